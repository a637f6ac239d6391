"""The CPU kernels are compiled by one process of a machine, while the others wait for its cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import llvmlite.binding
import numba

from common.cache_folder import locked
from common.errors import CheckpointError

_logger = logging.getLogger("pdserve.engine")


@contextmanager
def compile_once(what: str) -> Iterator[None]:
    """Run the body alone on this machine, unless another process has compiled `what` before.

    `what` says which kernels the body compiles; their sources are part of the name of the cache
    folder. Where the cache cannot be written, or another process takes too long, every process
    compiles for itself. The exception of a body passes through, and the next process compiles.
    """
    processor = llvmlite.binding.get_host_cpu_name()
    name = hashlib.sha256(f"{what} {processor} {numba.__version__}".encode()).hexdigest()[:16]
    stamp = Path(numba.config.CACHE_DIR) / f"{name}.compiled"
    if stamp.exists():
        yield
        return
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(stamp.with_suffix(".lock"))
        lock.__enter__()
    except (OSError, CheckpointError) as error:
        _logger.warning("CPU kernels: not shared with other processes: %s", error)
        yield
        return
    try:
        is_first = not stamp.exists()
        if is_first:
            _logger.info("compiling the CPU kernels: this is done once, and may take a minute")
            yield
            with suppress(OSError):  # then the next process compiles again, or finds it compiled
                stamp.touch()
    finally:
        lock.__exit__(None, None, None)
    if not is_first:
        yield  # what another process has compiled is loaded, by several at once
