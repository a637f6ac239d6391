"""Phases of a computation that a few threads share, with little overhead between them.

A layer at one row is eight phases of a few to tens of microseconds each. Entering numba's thread
pool for each of them would take a tenth of a step, so a team enters once and then goes from phase
to phase by itself. A phase is a number of shares of equal work; each thread claims the next
unclaimed share, and no thread starts the next phase before all shares are finished.

Any number of threads of the pool may join, at any time: a single thread does all shares of all
phases, and a late one finds them done. So correctness does not depend on the pool running them at
once, and a thread that the system has paused delays the others by no more than its share. A share's
result does not depend on the thread that computes it.

These functions have one signature each, and so one entry in numba's cache. The kernels of layers
and of draws call them, and two processes may compile those at the same time: the cache has no lock,
and entries of several signatures could be mixed up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_process_triple
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import INT64

SHARES_PER_THREAD = 4
"""Shares of large phases: enough that a late thread finds some, few enough for long reads."""
_FINISHED = 8
"""The index of a phase's second counter, which has a cache line of its own."""
_PHASE_COUNTERS = 16
_SPINS = 256
"""Reads of a counter before the thread yields the processor: some ten microseconds."""
_IS_X86 = get_process_triple().startswith("x86_64")


@intrinsic
def _add(typing: Any, address: Any) -> Any:
    """Add one to a counter atomically; return its value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _load(typing: Any, address: Any) -> Any:
    """Read a counter, with acquire order: writes before its increments are visible after."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.load_atomic(place, "acquire", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the processor that this loop waits, on x86; elsewhere do nothing."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _offer_processor(typing: Any) -> Any:
    """Yield the processor to another thread."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit("int64[:, ::1](int64)", nogil=True, cache=True)
def new_progress(num_phases: int) -> np.ndarray:
    """Return a team's shared state: for each phase the claimed and finished shares, 0 each."""
    return np.zeros((num_phases, _PHASE_COUNTERS), np.int64)


@njit("int64(int64[:, ::1], int64)", nogil=True, cache=True)
def claim(progress: np.ndarray, phase: int) -> int:
    """Claim and return the next share; one past the phase's number of shares means none."""
    return _add(progress[phase].ctypes.data)


@njit("void(int64[:, ::1], int64)", nogil=True, cache=True)
def finish(progress: np.ndarray, phase: int) -> None:
    """Count a claimed share as done."""
    _add(progress[phase, _FINISHED:].ctypes.data)


@njit("void(int64[:, ::1], int64, int64)", nogil=True, cache=True)
def wait_for_all(progress: np.ndarray, phase: int, num_shares: int) -> None:
    """Wait until every share of the phase is finished."""
    at = progress[phase, _FINISHED:].ctypes.data
    spins = 0
    while _load(at) < num_shares:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _offer_processor()
