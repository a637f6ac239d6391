"""`pdserve up` and `check-config` refuse what a role could not use, before anything runs."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.kv.memory_plan import DeviceMemory
from common.nodes import Role
from common.settings.config import Config, EngineConfig
from common.settings.tracing_config import TracingConfig
from pdserve.cli import main
from pdserve.configuration.config_sources import SettingsError
from pdserve.roles.usable import check_usable

GIB = 1 << 30
MEMORY = DeviceMemory(16 * GIB, "the memory of this machine", 0.3)


def problems(num_nodes: int = 2, **engine: object) -> list[str]:
    config = replace(Config(role=Role.DECODE), engine=replace(EngineConfig(), **engine))  # type: ignore[arg-type]
    try:
        check_usable(config, num_nodes, MEMORY)
    except SettingsError as error:
        return list(error.problems)
    return []


def with_disk(path: Path, size: int = 1 << 20) -> list[str]:
    return problems(prefix_host_memory=1 << 26, prefix_disk=str(path), prefix_disk_size=size)


def test_a_folder_of_prefixes_that_can_be_written_is_good(tmp_path: Path) -> None:
    assert with_disk(tmp_path / "new") == []
    assert list(tmp_path.iterdir()) == [], "what looks may be another user than the node"
    (tmp_path / "old").mkdir()
    assert with_disk(tmp_path / "old") == []
    assert list((tmp_path / "old").iterdir()) == [], "nothing is left there"


def test_a_folder_of_prefixes_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "no folder that can be written: File exists" in with_disk(tmp_path / "file")[0]
    assert "Not a directory" in with_disk(tmp_path / "file" / "below")[0]
    assert "No such file" in with_disk(tmp_path / "no" / "folder")[0]
    assert "no such user" in with_disk(Path("~nobody-at-all/x"))[0]


def test_a_folder_of_prefixes_that_everybody_writes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    assert "wanted a folder that only this user may write" in with_disk(folder)[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_has_no_room_for_now_is_told(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    config = replace(
        Config(role=Role.DECODE),
        engine=EngineConfig(prefix_host_memory=1 << 26, prefix_disk=str(tmp_path)),
    )
    assert check_usable(config, 2, MEMORY) == ""
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert os.strerror(number) in check_usable(config, 2, MEMORY)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it may be all that is wanted."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    assert check_usable(Config(role=Role.DECODE), 2, MEMORY) == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cache").touch()
    told = check_usable(Config(role=Role.DECODE), 2, MEMORY)
    assert told.startswith(f"the cache {tmp_path}/cache cannot be written: File exists: ")
    assert check_usable(Config(role=Role.ROUTER), 1, MEMORY) == ""
    monkeypatch.setenv("PDSERVE_CACHE", "~nobody-at-all/x")
    assert "no such user" in check_usable(Config(role=Role.DECODE), 2, MEMORY)


def test_files_of_prefixes_that_no_disk_of_this_size_holds_are_refused(tmp_path: Path) -> None:
    (problem,) = with_disk(tmp_path, 1 << 60)
    assert problem.startswith("prefix_disk_size is 1073741824.00 GiB, for 2 node(s)")


@pytest.mark.parametrize("name", ["prefix_host_memory", "kv_cache_memory"])
def test_sizes_that_no_machine_of_this_memory_has_are_refused(name: str) -> None:
    assert problems(**{name: 8 * GIB}) == []
    (problem,) = problems(**{name: 8 * GIB + 1})
    assert name in problem
    assert problem.endswith("wanted less than the memory of this machine has, 16.00 GiB")
    assert problems(1, **{name: 16 * GIB}) == []


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    assert problems(num_threads=3) == problems(num_threads=4, gpus="0") == []
    assert problems(num_threads=4) == [
        "num_threads is 4: wanted 0 to 3, the cores on which a node may run"
    ]


def test_a_cache_on_a_card_is_not_in_the_memory_of_the_machine() -> None:
    assert problems(kv_cache_memory=60 * GIB, gpus="0") == []


def test_a_folder_of_recordings_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = Config(role=Role.DECODE, tracing=TracingConfig(record=str(tmp_path / "file")))
    for role in (Role.DECODE, Role.ROUTER):
        with pytest.raises(SettingsError, match="no folder that can be written: File exists"):
            check_usable(replace(config, role=role), 2, MEMORY)


def test_a_folder_of_recordings_is_not_left_behind(tmp_path: Path) -> None:
    config = Config(role=Role.DECODE, tracing=TracingConfig(record=str(tmp_path / "a" / "b")))
    assert check_usable(config, 2, MEMORY) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_router_does_not_use_what_a_file_for_all_roles_says_of_nodes() -> None:
    engine = EngineConfig(kv_cache_memory=1 << 60, prefix_host_memory=1, prefix_disk="/no/such")
    assert check_usable(Config(role=Role.ROUTER, engine=engine), 1, MEMORY) == ""


def test_check_config_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    disk = ["--prefix-disk", str(tmp_path / "file"), "--prefix-disk-size", "1MiB"]
    arguments = ["check-config", "--model", "demo", *disk, "--prefix-host-memory", "1MiB"]
    assert main([*arguments, "--role", "decode", "--kv-cache-memory", "1000TiB"]) == 2
    shown = capsys.readouterr()
    assert "kv_cache_memory" in shown.err
    assert "no folder that can be written: File exists" in shown.err
    assert shown.out == ""
    assert main([*arguments, "--role", "router"]) == 0, "it is the nodes'"
