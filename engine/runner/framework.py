"""Paddle, imported once and in the right environment: `from engine.runner.framework import paddle`.

On processors other than Intel's, the CPU wheel's math library takes a slow path unless an
environment variable is set before it loads. So Paddle is imported only here, after that variable is
set. Importing this module raises `ConfigError` where Paddle is not installed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path

import numba

from common.errors import ConfigError


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


if _is_amd():
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Paddle recommends compilers for extensions
    try:
        import paddle
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        raise ConfigError(
            "Paddle is not installed: wanted pip install '.[cpu]', or '.[gpu]' with Paddle's "
            "package index"
        ) from None


def has_gpu() -> bool:
    """Return whether this Paddle can compute on a GPU of this machine."""
    return bool(paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0)


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` CPU threads (0: all cores) in Paddle's operators and in the kernels.

    Raises `ConfigError` when the machine has fewer.
    """
    available = numba.config.NUMBA_NUM_THREADS
    if num_threads > available:
        raise ConfigError(f"num_threads is {num_threads}: wanted 0 to {available} (all cores)")
    chosen = num_threads or available
    paddle.base.core.set_num_threads(chosen)
    numba.set_num_threads(chosen)
    _keep_thread_pool()


def _keep_thread_pool() -> None:
    """Prevent the interpreter from unloading numba's TBB thread pool.

    Unloading waits for the pool's work to end. On one core that never happens if the kernels ran in
    a thread that has ended. A further reference keeps the pool until the process ends.
    """
    pool = sys.modules.get("numba.np.ufunc.tbbpool")
    if pool is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
