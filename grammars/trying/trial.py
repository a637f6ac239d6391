"""One grammar tried in a process of its own, which ends with it, within limits of its own.

The library that compiles has no bound on the time, the memory and the stack that a text may take:
the kernel has. What the process leaves behind is its verdict, so no grammar outlives its trial.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.errors import InvalidRequest, Overloaded, PdserveError
from grammars.compiler import NAMES, GrammarCompiler
from grammars.gbnf import Gbnf, lark_of_gbnf
from grammars.kept import MAX_KEPT_BYTES
from grammars.own_stack import on_own_stack
from grammars.trying.messages import Trial, Verdict, error_fields, verdict_fields

_MIB = 1 << 20
_NICE = 5
"""Niceness of a trial: steps go first, and a short trial does not wait long."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one trial may take, and what it may leave.

    Seconds of CPU; bytes of memory while it compiles, and of stack; bytes of the compiled grammar.
    """

    cpu_s: int
    memory_bytes: int
    stack_bytes: int
    compiled_bytes: int


ROUTER_LIMITS = TrialLimits(2, 256 * _MIB, 8 * _MIB, 64 * _MIB)
NODE_LIMITS = TrialLimits(6, 384 * _MIB, 16 * _MIB, 96 * _MIB)
"""More than a router's: what a router lets pass does not end on a node that is slower."""


def run_trial(
    trial: Trial, compiler: GrammarCompiler | None, limits: TrialLimits, reply_fd: int
) -> NoReturn:
    """Write the verdict, as JSON, to `reply_fd` and end this process, a fork for this alone."""
    fields: dict[str, Any]
    try:
        _limit_this_process(limits)
        fields = verdict_fields(
            on_own_stack(limits.stack_bytes, lambda: verdict(trial, compiler, limits))
        )
    except MemoryError:
        os._exit(_NO_MEMORY)
    except PdserveError as error:
        fields = error_fields(error)
    except Exception as error:
        fields = error_fields(error) | {"error": "InternalError", "message": repr(error)}
    reply = json.dumps(fields).encode()
    with suppress(BrokenPipeError):
        while reply:
            reply = reply[os.write(reply_fd, reply) :]
    os._exit(0)


_NO_MEMORY = 3
"""The exit code of a trial for which memory ran out within the interpreter."""
_OF_CPU = -signal.SIGXCPU
_OF_MEMORY = (-signal.SIGABRT, _NO_MEMORY)
_OF_STACK = (-signal.SIGSEGV, -signal.SIGBUS)
_LIMITS_MET = (_OF_CPU, *_OF_MEMORY, *_OF_STACK)


def why_ended(trial: Trial, status: int, limits: TrialLimits) -> InvalidRequest:
    """Return the client's error for a trial that ended without a verdict.

    `status` is as `os.waitpid` has it.
    """
    end, grammar = os.waitstatus_to_exitcode(status), trial.grammar
    name = "grammar" if isinstance(grammar, Gbnf) else NAMES[grammar.kind]
    if end == _OF_CPU:
        why = f"takes more than {limits.cpu_s} s of CPU to be compiled: wanted a simpler one"
    elif end in _OF_MEMORY:
        why = f"takes more than {limits.memory_bytes // _MIB} MiB to be compiled"
        why += ": wanted a smaller one"
    elif end in _OF_STACK:
        why = f"takes more than {limits.stack_bytes // _MIB} MiB of stack to be compiled"
        why += ": wanted shorter chains of rules or references, and smaller numbers"
    else:
        why = f"ended the process that compiles it twice, at last with {end}"
    return InvalidRequest(f"the {name} {why}", param=grammar.source or None)


def is_final(status: int) -> bool:
    """Return whether a trial that ended so would end so again: it met a limit of its own.

    Another end, such as that of a machine without memory, may have come from outside.
    """
    return os.waitstatus_to_exitcode(status) in _LIMITS_MET


def verdict(trial: Trial, compiler: GrammarCompiler | None, limits: TrialLimits) -> Verdict:
    """Try a grammar to its end. Raises `InvalidRequest` for one that is wrong, or too large."""
    if isinstance(trial.grammar, Gbnf):
        return Verdict(instead=lark_of_gbnf(trial.grammar))
    assert compiler is not None
    followed = None
    try:
        followed = compiler.check(trial.grammar, trial.parts)
        num_bytes = compiler.bytes_of(followed)
    except Overloaded:  # more than all that may be kept
        num_bytes = MAX_KEPT_BYTES
    if num_bytes > limits.compiled_bytes:
        raise InvalidRequest(
            f"the {NAMES[trial.grammar.kind]} takes {num_bytes // _MIB} MiB when it is "
            f"compiled: wanted at most {limits.compiled_bytes // _MIB} MiB",
            param=trial.grammar.source or None,
        )
    return Verdict(num_bytes, None if followed == trial.grammar else followed)


def _limit_this_process(limits: TrialLimits) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the library tells there how it failed
    os.nice(_NICE)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = taken + limits.memory_bytes + limits.stack_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
