"""A node's files of prefixes, from its configuration and model."""

from __future__ import annotations

from common.errors import ConfigError
from common.files.cache_folder import full_path
from common.settings.config import Config
from engine.core.blocks.disk_index import DiskIndex, bytes_taken
from engine.prefix_disk.block_file import HEADER_BYTES
from engine.prefix_disk.block_folder import BlockFolder
from engine.prefix_disk.disk_threads import DiskThreads
from node.life.make_scheduler import SchedulableModel
from node.life.node_parts import LoadedModel


def disk_index_of(config: Config, model: SchedulableModel) -> DiskIndex | None:
    """Return an empty index for this node's files; None where there are to be none.

    Raises `ConfigError` when not even one block has room.
    """
    if not config.engine.prefix_disk:
        return None
    index = DiskIndex(config.engine.prefix_disk_size, HEADER_BYTES + model.layout.block_bytes)
    if index.most_blocks == 0:
        raise ConfigError(
            f"prefix_disk_size is {index.max_bytes} bytes: wanted at least "
            f"{bytes_taken(HEADER_BYTES + model.layout.block_bytes)}, the file of one block"
        )
    return index


def start_disk(config: Config, model: LoadedModel) -> DiskThreads | None:
    """Start what reads and writes this node's files; None where there are to be none.

    Raises `ConfigError` for a path that cannot be made absolute.
    """
    if not config.engine.prefix_disk:
        return None
    path = full_path(config.engine.prefix_disk)
    return DiskThreads(BlockFolder(path, model.layout.fingerprint, model.host_kv))
