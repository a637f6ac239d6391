"""What a soak has shown: ends of requests, stalls by kind of fault, what processes hold."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.nodes import Role
from common.observing.latency import percentile
from tests.soak.clients import Ended, Try, outcomes
from tests.soak.cluster import ROLES
from tests.soak.schedule import RECOVERY_S, STORE, Fault
from tests.support.cluster.cluster import Cluster

MORE_DESCRIPTORS, MORE_MIB = 40, 96.0
"""How much more than after its start a process may hold at the end."""
_USUAL_GAP_S = 0.2
"""A stall begins with the last token before its fault."""


@dataclass(frozen=True, slots=True)
class Done:
    """A fault as it was done, on the monotonic clock."""

    fault: Fault
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """What the kernel says that a process holds."""

    num_descriptors: int
    resident_mib: float


def held_by(cluster: Cluster) -> dict[str, Held]:
    """Descriptors and resident memory of every process that has not ended."""
    found = {name: held(process.pid) for name, process in cluster.processes.items()}
    return {name: one for name, one in found.items() if one is not None}


def held(pid: int) -> Held | None:
    """What a process holds; None: it has ended, maybe while this reads it."""
    proc = Path(f"/proc/{pid}")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = (proc / "status").read_text()
        rss = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        if rss:  # one that nobody has waited for has no memory
            return Held(len(list((proc / "fd").iterdir())), int(rss[0].split()[1]) / 1024)
    return None


def more_held(at_start: Mapping[str, Held], at_end: Mapping[str, Held]) -> list[str]:
    """What is wrong with what processes hold: they hold much more than at the start, or ended."""
    complaints = [f"{name} has ended" for name in at_start if name not in at_end]
    for name, before in at_start.items():
        now = at_end.get(name, before)
        if now.num_descriptors > before.num_descriptors + MORE_DESCRIPTORS:
            complaints.append(
                f"{name} has {now.num_descriptors} descriptors, and had {before.num_descriptors}"
            )
        if now.resident_mib > before.resident_mib + MORE_MIB:
            complaints.append(
                f"{name} has {now.resident_mib:.0f} MiB, and had {before.resident_mib:.0f}"
            )
    return complaints


@dataclass(slots=True)
class _Measured:
    """What streams had of one kind of fault, in seconds; the last is a number of streams."""

    longest_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    num_on_frozen_router: int = 0


def stalls_by_kind(ended: Sequence[Ended], done: Sequence[Done]) -> dict[str, dict[str, float]]:
    """For each kind of fault: the longest stall of each stream in progress, and first tokens.

    A fault counts until its target should work as before. A stall counts for the faults before it,
    not for those that begin while it lasts; so does the wait for a first token. A stall during
    which the stream's router was frozen counts for the freeze alone: `on_frozen_router` is the
    number of streams of which another fault has one left out.
    """
    measured: dict[str, _Measured] = defaultdict(_Measured)
    for fault in done:
        _add_stalls(measured[_kind_of(fault.fault)], fault, ended, done)
    return {kind: _figures(of_kind) for kind, of_kind in sorted(measured.items())}


def _add_stalls(
    measured: _Measured, fault: Done, ended: Sequence[Ended], done: Sequence[Done]
) -> None:
    since_s, ended_s = fault.began_s - _USUAL_GAP_S, fault.ended_s + RECOVERY_S
    freezes = [one for one in done if one is not fault and _is_router_freeze(one.fault)]
    for one in ended:
        stalls = [stall for stall in one.stalls if since_s < stall[0] < ended_s]
        own = [stall for stall in stalls if not _was_frozen(freezes, one.tries[-1:], stall)]
        if own:
            measured.longest_s.append(max(to - since for since, to in own))
        measured.num_on_frozen_router += len(own) < len(stalls)
        wait = one.began_s, one.first_at_s
        is_first = one.first_at_s > 0.0 and since_s < one.began_s < ended_s
        if is_first and not _was_frozen(freezes, one.tries, wait):
            measured.first_tokens_s.append(one.first_at_s - one.began_s)


def _is_router_freeze(fault: Fault) -> bool:
    return fault.is_freeze and ROLES[fault.target] is Role.ROUTER


def _was_frozen(freezes: Sequence[Done], tries: Sequence[Try], span: tuple[float, float]) -> bool:
    """Return whether a router of one of the tries was frozen within a span of time."""
    names = {f"router-{one.router}" for one in tries}
    return any(
        freeze.fault.target in names and freeze.began_s < span[1] and freeze.ended_s > span[0]
        for freeze in freezes
    )


def _figures(measured: _Measured) -> dict[str, float]:
    longest_s, first_s = measured.longest_s, measured.first_tokens_s
    figures: dict[str, float] = {
        "streams": len(longest_s),
        "on_frozen_router": measured.num_on_frozen_router,
    }
    if longest_s:
        figures["p50_s"] = round(percentile(longest_s, 50), 2)
        figures["p99_s"] = round(percentile(longest_s, 99), 2)
        figures["longest_s"] = round(max(longest_s), 2)
    if first_s:
        figures["first_token_p99_s"] = round(percentile(first_s, 99), 2)
    return figures


def _kind_of(fault: Fault) -> str:
    """Return the kind with the role that it was done to."""
    return fault.kind if fault.target == STORE else f"{fault.kind} {ROLES[fault.target].value}"


def summary(ended: Sequence[Ended], done: Sequence[Done]) -> dict[str, Any]:
    """The figures of a soak."""
    return {
        **outcomes(ended),
        "faults": dict(Counter(_kind_of(one.fault) for one in done)),
        "stalls": stalls_by_kind(ended, done),
    }


def as_json(held: dict[str, Held]) -> dict[str, Any]:
    """Plain values."""
    return {name: asdict(one) for name, one in held.items()}
