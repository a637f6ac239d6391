"""Which files a node has, by its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from common.nodes import Role
from common.settings.config import Config
from engine.prefix_disk.block_file import HEADER_BYTES
from node.life.prefix_disk import disk_index_of, start_disk
from tests.support.engine.hash_runner import HashRunner


def config(**given: object) -> Config:
    made = Config(role=Role.MIXED)
    return replace(made, engine=replace(made.engine, **given))  # type: ignore[arg-type]


def test_without_a_folder_there_are_no_files() -> None:
    model = HashRunner(num_blocks=4)
    assert disk_index_of(config(), model) is None
    assert start_disk(config(), model, b"") is None


def test_a_node_has_files_of_its_blocks(tmp_path: Path) -> None:
    model = HashRunner(num_blocks=4, num_host_blocks=2)
    given = config(prefix_disk=str(tmp_path / "x"), prefix_disk_size=1 << 20)
    index = disk_index_of(given, model)
    assert index is not None
    assert index.most_blocks == 256
    threads = start_disk(given, model, b"")
    assert threads is not None
    threads.close(60.0)


def test_a_size_below_a_block_is_refused(tmp_path: Path) -> None:
    given = config(prefix_disk=str(tmp_path / "x"), prefix_disk_size=4095)
    with pytest.raises(ConfigError, match="is 4095 bytes: wanted at least 4096, the file of one"):
        disk_index_of(given, HashRunner(num_blocks=4))


SECRET = b"s" * 40


def test_encrypted_files_are_never_written_without_a_key(tmp_path: Path) -> None:
    model = HashRunner(num_blocks=4, num_host_blocks=2)
    given = config(
        prefix_disk=str(tmp_path / "x"), prefix_disk_size=1 << 20, prefix_disk_encryption=True
    )
    with pytest.raises(ConfigError, match="encryption is on: wanted kv_key, or keys"):
        start_disk(given, model, b"")
    threads = start_disk(given, model, SECRET)
    assert threads is not None
    threads.close(60.0)


@pytest.mark.parametrize(("is_encrypted", "most_blocks"), [(False, 2), (True, 1)])
def test_what_encryption_adds_counts_against_the_bound(
    is_encrypted: bool, most_blocks: int
) -> None:
    """A plain file fills a block of the file system exactly."""
    model: Any = SimpleNamespace(layout=SimpleNamespace(block_bytes=4096 - HEADER_BYTES))
    given = config(prefix_disk="/x", prefix_disk_size=8192, prefix_disk_encryption=is_encrypted)
    index = disk_index_of(given, model)
    assert index is not None
    assert index.most_blocks == most_blocks
