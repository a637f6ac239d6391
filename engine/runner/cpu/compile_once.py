"""What one process of a machine does while the others wait: compile the CPU kernels, or measure."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import llvmlite.binding
import numba

from common.errors import CheckpointError
from common.files.cache_folder import locked, try_locked

_logger = logging.getLogger("pdserve.engine")

_ALONE_WAIT_S = 30.0
"""Measuring takes a few seconds; a process that is stopped meanwhile must not stop all others."""


@contextmanager
def compile_once(what: str) -> Iterator[None]:
    """Run the body alone on this machine, unless another process has compiled `what` before.

    `what` says which kernels the body compiles; their sources are part of the name of the cache
    folder. Where the cache cannot be written, or another process takes too long, every process
    compiles for itself. The exception of a body passes through, and the next process compiles.
    """
    stamp = _stamp(what)
    if stamp.exists():
        yield
        return
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(_lock_path(stamp))
        lock.__enter__()
    except (OSError, CheckpointError) as error:
        _logger.warning("CPU kernels: not shared with other processes: %s", error)
        yield
        return
    try:
        is_first = not stamp.exists()
        if is_first:
            with _first(stamp):
                yield
    finally:
        lock.__exit__(None, None, None)
    if not is_first:
        yield  # what another process has compiled is loaded, by several at once


def compile_together(parts: Mapping[str, Callable[[], object]]) -> None:
    """Call all functions of `parts` that no process of this machine has called, each in one.

    The processes that do so at the same time divide them: first each takes what no other one
    compiles, then it waits for the rest. The keys are as in `compile_once`.
    """
    missing = [what for what in parts if not _stamp(what).exists()]
    taken: list[str] = []
    for what in missing:
        if not _has_compiled(_stamp(what), parts[what]):
            taken.append(what)
    for what in taken:
        with compile_once(what):
            if not _stamp(what).exists():
                parts[what]()


@contextmanager
def alone_on_machine() -> Iterator[None]:
    """Run the body while no other process of this machine runs one.

    Nodes that start together would measure each other's threads, and take several times as long.
    Where nothing can be locked, or another process takes too long, the body runs beside others.
    """
    with ExitStack() as held:
        try:
            folder = Path(numba.config.CACHE_DIR)
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / "alone.lock", _ALONE_WAIT_S))
        except (OSError, CheckpointError) as error:
            _logger.warning("steps are measured beside other processes: %s", error)
        yield


def _has_compiled(stamp: Path, compile_part: Callable[[], object]) -> bool:
    """Compile, unless another process does so now or it cannot be locked; return True if it is."""
    with ExitStack() as held:
        try:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            is_held = held.enter_context(try_locked(_lock_path(stamp)))
        except OSError:
            return False
        if is_held and not stamp.exists():
            with _first(stamp):
                compile_part()
        return is_held


@contextmanager
def _first(stamp: Path) -> Iterator[None]:
    """Leave the stamp behind a body that compiles."""
    yield
    with suppress(OSError):  # then the next process compiles again, or finds it compiled
        stamp.touch()


def _stamp(what: str) -> Path:
    """Return the path of the file that says that `what` is compiled on such a machine.

    The folder is that of the kernels' sources.
    """
    facts = f"{what} {llvmlite.binding.get_host_cpu_name()} {numba.__version__}"
    digest = hashlib.sha256(facts.encode())
    return Path(numba.config.CACHE_DIR) / f"{digest.hexdigest()[:16]}.compiled"


def _lock_path(stamp: Path) -> Path:
    return stamp.with_suffix(".lock")
