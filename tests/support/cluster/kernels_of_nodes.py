"""Loads the kernels of nodes when this is imported, in a template: their machine code, no thread.

numba ends a process that computes if it was forked from one that had set up OpenMP, whose threads
do not survive a fork. Loading the first kernel with a parallel loop sets it up, which starts no
thread: OpenMP makes threads in the first loop of more than one. So to set it up is left to the
forks, by `set_up_threads`. Kernels that are loaded when they are called are called on one thread.

numba takes a lock whenever it is asked for its number of threads, which forks share with their
template: where one is killed or stopped with it, all others would wait. So each fork has its own.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

import numba

importlib.import_module("engine.runner.kernels")  # says how idle threads of OpenMP wait
parallel: Any = importlib.import_module("numba.np.ufunc.parallel")
omppool: Any = importlib.import_module("numba.np.ufunc.omppool")  # it has no types
_SetUp = ctypes.CFUNCTYPE(None, ctypes.c_int)
_set_up = _SetUp(omppool.launch_threads)
_put_off = _SetUp(lambda num_threads: None)
_KERNELS = (
    "engine.runner.cpu.common_kernels",
    "engine.runner.cpu.decoder",
    "engine.runner.cpu.mtp",
    "engine.runner.gpu.back_end",
    "engine.runner.start.assemble",
    "kv_transfer.lanes.fused_copy",
)


def set_up_threads() -> None:
    """Let this process compute, once, before its first kernel runs."""
    parallel._backend_init_process_lock = threading.RLock()
    _set_up(numba.config.NUMBA_NUM_THREADS)


def _load() -> None:
    address = omppool.launch_threads
    omppool.launch_threads = ctypes.cast(_put_off, ctypes.c_void_p).value
    try:
        for name in _KERNELS:
            importlib.import_module(name)
        _call_all()
    finally:
        omppool.launch_threads = address


def _call_all() -> None:
    from engine.runner.cpu.common_kernels import compile_attention, compile_draws, compile_layers

    num_threads = numba.get_num_threads()
    numba.set_num_threads(1)
    for call in (compile_layers, compile_attention, compile_draws):
        call()
    numba.set_num_threads(num_threads)


_load()
