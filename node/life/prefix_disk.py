"""A node's files of prefixes, from its configuration and model."""

from __future__ import annotations

from common.errors import ConfigError
from common.files.cache_folder import full_path
from common.settings.config import Config
from engine.core.blocks.disk_index import DiskIndex, bytes_taken
from engine.prefix_disk.block_folder import BlockFolder, file_bytes
from engine.prefix_disk.block_seal import BlockSeal
from engine.prefix_disk.disk_threads import DiskThreads
from node.life.make_scheduler import SchedulableModel
from node.life.node_parts import LoadedModel


def disk_index_of(config: Config, model: SchedulableModel) -> DiskIndex | None:
    """Return an empty index for this node's files; None where there are to be none.

    Raises `ConfigError` when not even one block has room.
    """
    if not config.engine.prefix_disk:
        return None
    is_sealed = config.engine.prefix_disk_encryption
    num_bytes = file_bytes(model.layout.block_bytes, is_sealed=is_sealed)
    index = DiskIndex(config.engine.prefix_disk_size, num_bytes)
    if index.most_blocks == 0:
        raise ConfigError(
            f"prefix_disk_size is {index.max_bytes} bytes: wanted at least "
            f"{bytes_taken(num_bytes)}, the file of one block"
        )
    return index


def start_disk(config: Config, model: LoadedModel, kv_secret: bytes) -> DiskThreads | None:
    """Start what reads and writes this node's files; None where there are to be none.

    Files that are to be encrypted are so with a key made of `kv_secret`. Raises `ConfigError` where
    that is empty, and for a path that cannot be made absolute.
    """
    if not config.engine.prefix_disk:
        return None
    seal = None
    if config.engine.prefix_disk_encryption:
        if not kv_secret:
            raise ConfigError("prefix_disk_encryption is on: wanted kv_key, or keys")
        seal = BlockSeal(kv_secret)
    path = full_path(config.engine.prefix_disk)
    folder = BlockFolder(path, model.layout.fingerprint, model.host_kv, seal=seal)
    return DiskThreads(folder)
