"""Paddle, imported once and in the right environment: `from engine.runner.framework import paddle`.

The CPU wheel's math library takes a slow path on processors other than Intel's unless an
environment variable, read when it loads, says otherwise; hence this module and no other imports
Paddle first. Importing it raises `ConfigError` where Paddle is not installed.
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
    warnings.simplefilter("ignore")  # it advises tools for compiling extensions
    try:
        import paddle
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        raise ConfigError(
            "Paddle is not installed: wanted pip install 'pdserve[cpu]' or 'pdserve[gpu]'"
        ) from None


def has_gpu() -> bool:
    """Whether this Paddle can compute on a GPU of this machine."""
    return bool(paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0)


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` CPU threads (0: all cores) in Paddle's operators and in the kernels."""
    available = numba.config.NUMBA_NUM_THREADS
    if num_threads > available:
        raise ConfigError(f"num_threads is {num_threads}: wanted 0 to {available}, this machine's")
    chosen = num_threads or available
    paddle.base.core.set_num_threads(chosen)
    numba.set_num_threads(chosen)
    _keep_thread_pool()


def _keep_thread_pool() -> None:
    """Leave the kernels' threads to the process's end.

    numba's pool on TBB, unloaded with the interpreter, waits for its work to end. On one core that
    is for ever where the kernels ran in a thread that has ended: so it is never unloaded.
    """
    pool = sys.modules.get("numba.np.ufunc.tbbpool")
    if pool is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
