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

A team is entered by `run_team`. numba compiles the body of a loop over `prange` three times (in the
loop's function, as a kernel, and in that kernel's wrapper), which would take longer than all the
rest. So the only such loop is that of `_members`, which calls a function by its address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_process_triple
from numba import njit, prange, types
from numba.core import cgutils, typing
from numba.extending import intrinsic

from engine.runner.kernels.compiled import NUM_ARGUMENTS, call_at
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
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, INT64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _load(typing: Any, address: Any) -> Any:
    """Read a counter, with acquire order: writes before its increments are visible after."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", align=8)

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
    """Return a team's counters, a row for each phase: of claimed and finished shares, 0 each."""
    return np.zeros((num_phases, _PHASE_COUNTERS), np.int64)


@njit("int64(int64[::1])", nogil=True, cache=True)
def claim(counters: np.ndarray) -> int:
    """Claim and return a phase's next share; one past its number of shares means none."""
    return _add(counters.ctypes.data)


@njit("void(int64[::1])", nogil=True, cache=True)
def finish(counters: np.ndarray) -> None:
    """Count a claimed share as done."""
    _add(counters[_FINISHED:].ctypes.data)


@njit("void(int64[::1], int64)", nogil=True, cache=True)
def wait_for_all(counters: np.ndarray, num_shares: int) -> None:
    """Wait until every share of the phase is finished."""
    at = counters[_FINISHED:].ctypes.data
    spins = 0
    while _load(at) < num_shares:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _offer_processor()


@njit("void(int64, int64, int64)", nogil=True, cache=True, error_model="numpy", parallel=True)
def _members(function: int, arguments: int, num_threads: int) -> None:
    """Call the function at an address once for each member, with the member's number."""
    for member in prange(num_threads):
        call_at(function, arguments, member, 0, 0, 0, 0, 0, 0)


@intrinsic
def run_team(typing_context: Any, function: Any, num_threads: Any, arguments: Any) -> Any:
    """Call the compiled `function(member, *arguments)` on up to `num_threads` threads at once.

    It returns nothing. Raises `MemoryError` where a member failed: kernels fail in no other way.
    """
    kinds = (types.int64, *arguments.types)
    function.get_call_type(typing_context, kinds, {})  # compiles it

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        packed = cgutils.alloca_once_value(builder, values[2])
        failed = cgutils.alloca_once_value(builder, INT64(0))
        # One pointer is passed on: that of the pointers to both.
        shared = cgutils.alloca_once_value(
            builder,
            cgutils.pack_array(builder, [builder.ptrtoint(p, INT64) for p in (packed, failed)]),
        )
        compiled = function.dispatcher.get_compile_result(typing.signature(types.none, *kinds))
        context.add_linking_libs([compiled.library])
        member = _member(context, builder.module, compiled.fndesc, arguments)
        launch = _members.get_compile_result(typing.signature(types.none, *[types.int64] * 3))
        context.add_linking_libs([launch.library])
        context.call_conv.call_function(
            builder,
            context.declare_function(builder.module, launch.fndesc),
            types.none,
            launch.fndesc.argtypes,
            [builder.ptrtoint(member, INT64), builder.ptrtoint(shared, INT64), values[1]],
        )
        has_failed = builder.icmp_unsigned("!=", builder.load(failed), INT64(0))
        with builder.if_then(has_failed, likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel's buffers",))
        return context.get_dummy_value()

    return types.none(function, types.int64, arguments), codegen


def _member(context: Any, module: Any, compiled: Any, arguments: Any) -> Any:
    """Return a function for `call_at` that calls the `compiled` one with a member's arguments."""
    kind = ir.FunctionType(ir.VoidType(), [INT64] * NUM_ARGUMENTS)
    own = ir.Function(module, kind, module.get_unique_name("member"))
    own.linkage = "internal"
    builder = ir.IRBuilder(own.append_basic_block("entry"))
    pointers = builder.inttoptr(own.args[0], ir.ArrayType(INT64, 2).as_pointer())
    packed_at, failed_at = cgutils.unpack_tuple(builder, builder.load(pointers), 2)
    stored = context.get_value_type(arguments)
    values = builder.load(builder.inttoptr(packed_at, stored.as_pointer()))
    status, _ = context.call_conv.call_function(
        builder,
        context.declare_function(module, compiled),
        types.none,
        compiled.argtypes,
        [own.args[1], *cgutils.unpack_tuple(builder, values, len(arguments.types))],
    )
    with builder.if_then(status.is_error, likely=False):
        builder.store(INT64(1), builder.inttoptr(failed_at, INT64.as_pointer()))
    builder.ret_void()
    return own
