"""Phases of a computation that a few threads share, with little between them.

A layer at one row is eight phases of a few microseconds to tens each. Entering numba's thread pool
for every one of them would take a tenth of a step, so a team enters once and then goes from phase
to phase by itself. A phase is so many shares of equal work; each thread claims the next that nobody
has, and nobody goes on before all are finished.

Any number of threads of the pool may come, at any time: one alone does all shares of all phases,
and one that comes late finds them done. So nothing depends on the pool's running them at once, and
a thread that the system has stopped delays the others by no more than the share it holds. Who
computes a share changes nothing in its results.
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
"""Of large phases: enough for a late thread to find some left, few enough to read far in a row."""
_FINISHED = 8
"""The second counter of a phase has a cache line of its own."""
_PHASE_COUNTERS = 16
_SPINS = 256
"""Looks at a counter before the processor is offered to others: some ten microseconds."""
_IS_X86 = get_process_triple().startswith("x86_64")


@intrinsic
def _add(typing: Any, address: Any) -> Any:
    """Count one up, atomically; what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _load(typing: Any, address: Any) -> Any:
    """What the counter shows, and after it what was written before it was counted up."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.load_atomic(place, "acquire", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the processor that this is a loop that waits, where it can be told."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _offer_processor(typing: Any) -> Any:
    """Let another thread run here, if one wants to."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True, cache=True)
def new_progress(num_phases: int) -> np.ndarray:
    """What a team shares: each phase's claimed and finished shares, none yet."""
    return np.zeros((num_phases, _PHASE_COUNTERS), np.int64)


@njit(nogil=True, cache=True)
def claim(progress: np.ndarray, phase: int) -> int:
    """The next share that is this thread's; those from the phase's number of shares on are none."""
    return _add(progress[phase].ctypes.data)


@njit(nogil=True, cache=True)
def finish(progress: np.ndarray, phase: int) -> None:
    """A claimed share is done."""
    _add(progress[phase, _FINISHED:].ctypes.data)


@njit(nogil=True, cache=True)
def wait_for_all(progress: np.ndarray, phase: int, num_shares: int) -> None:
    """Until every share of the phase is finished."""
    at = progress[phase, _FINISHED:].ctypes.data
    spins = 0
    while _load(at) < num_shares:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _offer_processor()
