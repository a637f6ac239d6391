"""Checks that a role can use what its settings name on this machine, for `up` and `check-config`.

A node that cannot write its files of prefixes serves without them, and says so in its log alone. A
disk that is full or read-only may have room again, and files there can be read: that is told, and
nothing is refused.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.control_group import num_visible_cores
from common.errors import ConfigError
from common.files.cache_folder import cache_root, full_path
from common.files.trusted_folder import why_untrusted
from common.kv.memory_plan import DeviceMemory
from common.nodes import Role
from common.settings.config import Config
from pdserve.configuration.config_sources import SettingsError

_PROBE_BYTES = 1 << 20
_FOR_NOW = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def check_usable(config: Config, num_nodes: int, memory: DeviceMemory) -> str:
    """Raise `SettingsError` for sizes and paths of which `num_nodes` roles of this host cannot
    make use. Nothing is left in the folders.

    Returns what they cannot use for now, in words; empty where they can use all.
    """
    problems, unwritten = [*_record_problems(config)], [""]
    if config.role is not Role.ROUTER:
        problems += _size_problems(config, num_nodes, memory)
        unwritten = [_check_disk(config, num_nodes, problems), _unwritten_cache()]
    if problems:
        raise SettingsError(problems)
    return "; ".join(filter(None, unwritten))


def _size_problems(config: Config, num_nodes: int, memory: DeviceMemory) -> Iterator[str]:
    engine, scheduling = config.engine, config.scheduling
    sizes = {"prefix_host_memory": engine.prefix_host_memory}
    if scheduling.preemption_mode == "swap":
        sizes["swap_space"] = scheduling.swap_space
    if not engine.gpus:
        sizes["kv_cache_memory"] = engine.kv_cache_memory
    asked = {name: size for name, size in sizes.items() if size}
    taken = sum(asked.values()) * num_nodes
    if engine.num_threads > num_visible_cores() and not engine.gpus:
        yield (
            f"num_threads is {engine.num_threads}: wanted 0 to {num_visible_cores()}, the cores on "
            "which a node may run"
        )
    if taken > memory.total_bytes:
        are = " and ".join(f"{name} {_size(size)}" for name, size in asked.items())
        yield (
            f"{are}: {num_nodes} node(s) take {_size(taken)}: wanted less than {memory.name} has, "
            f"{_size(memory.total_bytes)}"
        )


def _record_problems(config: Config) -> Iterator[str]:
    if record := config.tracing.record:
        try:
            folder = full_path(record)
            with _existing(folder, makes_parents=True):
                _require_writable(folder)
        except OSError as error:
            yield f"record is {record!r}: no folder that can be written: {error.strerror}"
        except ConfigError as error:
            yield f"record is {record!r}: {error}"


def _check_disk(config: Config, num_nodes: int, problems: list[str]) -> str:
    """Add what is wrong with the folder of prefixes; return why it is only read for now."""
    disk = config.engine.prefix_disk
    if not disk:
        return ""
    try:
        folder = full_path(disk)
        with _existing(folder, makes_parents=False):
            problems += _disk_problems(config, folder, num_nodes)
            _require_writable(folder)
    except OSError as error:
        if error.errno in _FOR_NOW and folder.is_dir():
            why = error.strerror
            return f"prefix_disk {disk!r} is only read, as it cannot be written now: {why}"
        problems.append(f"prefix_disk is {disk!r}: no folder that can be written: {error.strerror}")
    except ConfigError as error:
        problems.append(f"prefix_disk is {disk!r}: {error}")
    return ""


def _unwritten_cache() -> str:
    """Return why the cache cannot be written. What is in it already is used all the same."""
    try:
        folder = cache_root()
        with _existing(folder, makes_parents=True):
            _require_writable(folder)
    except OSError as error:
        return (
            f"the cache {folder} cannot be written: {error.strerror}: a start compiles what is not "
            "in it, and cannot pack weights (PDSERVE_CACHE names another folder)"
        )
    except ConfigError as error:
        return str(error)
    return ""


def _disk_problems(config: Config, folder: Path, num_nodes: int) -> Iterator[str]:
    """Yield what is wrong with the folder, as a node finds it. Raises `OSError`."""
    if problem := why_untrusted(folder, has_contents=False):
        yield f"prefix_disk: {problem}: wanted a folder that only this user may write"
    size, there_is = config.engine.prefix_disk_size * num_nodes, shutil.disk_usage(folder).total
    if size > there_is:
        yield (
            f"prefix_disk_size is {_size(config.engine.prefix_disk_size)}, for {num_nodes} node(s) "
            f"{_size(size)}: wanted at most what the disk of {folder} has, {_size(there_is)}"
        )


@contextmanager
def _existing(folder: Path, *, makes_parents: bool) -> Iterator[None]:
    """Make a folder that is missing, and remove it again: its node may be of another user.

    Raises `OSError`.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(0o700, parents=makes_parents, exist_ok=True)
        yield
    finally:
        for one in missing:
            with suppress(OSError):
                one.rmdir()


def _require_writable(folder: Path) -> None:
    """Write something into a folder and remove it. Raises `OSError`."""
    file, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
    try:
        os.posix_fallocate(file, 0, _PROBE_BYTES)
    finally:
        os.close(file)
        with suppress(OSError):
            Path(name).unlink()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
