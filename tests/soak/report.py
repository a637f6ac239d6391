"""What a soak has shown: ends of requests, stalls by kind of fault, what processes hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.latency import percentile
from tests.cluster.cluster import Cluster
from tests.soak.clients import Ended
from tests.soak.cluster import ROLES
from tests.soak.schedule import RECOVERY_S, STORE, Fault

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
    """Descriptors and resident memory of every process."""
    held = {}
    for name, process in cluster.processes.items():
        proc = Path(f"/proc/{process.pid}")
        status = (proc / "status").read_text()
        (rss,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        held[name] = Held(len(list((proc / "fd").iterdir())), int(rss.split()[1]) / 1024)
    return held


def stalls_by_kind(ended: Sequence[Ended], done: Sequence[Done]) -> dict[str, dict[str, float]]:
    """For each kind of fault: the longest stall of each stream in progress, and first tokens.

    A fault counts until its target should work as before. A stall counts for the faults before it,
    not for those that begin while it lasts; so does the wait for a first token.
    """
    longest: dict[str, list[float]] = defaultdict(list)
    first: dict[str, list[float]] = defaultdict(list)
    for fault in done:
        kind = _kind_of(fault.fault)
        since_s, ended_s = fault.began_s - _USUAL_GAP_S, fault.ended_s + RECOVERY_S
        for one in ended:
            stalls = [to - since for since, to in one.stalls if since_s < since < ended_s]
            if stalls:
                longest[kind].append(max(stalls))
            if one.first_at_s and since_s < one.began_s < ended_s:
                first[kind].append(one.first_at_s - one.began_s)
    return {
        kind: {
            "streams": len(stalls),
            "p50_s": round(percentile(stalls, 50), 2),
            "p99_s": round(percentile(stalls, 99), 2),
            "longest_s": round(max(stalls), 2),
            "first_token_p99_s": round(percentile(first[kind], 99), 2) if first[kind] else 0.0,
        }
        for kind, stalls in sorted(longest.items())
    }


def _kind_of(fault: Fault) -> str:
    """Return the kind with the role that it was done to."""
    return fault.kind if fault.target == STORE else f"{fault.kind} {ROLES[fault.target].value}"


def summary(ended: Sequence[Ended], done: Sequence[Done]) -> dict[str, Any]:
    """The figures of a soak."""
    failures = [one.failure for one in ended if one.failure]
    return {
        "requests": len(ended),
        "by_kind": dict(Counter(one.kind for one in ended)),
        "tokens": sum(one.num_tokens for one in ended),
        "wrong": sum(failure.startswith("WRONG") for failure in failures),
        "failed": sum(not failure.startswith("WRONG") for failure in failures),
        "retried": sum(bool(one.num_retries) for one in ended),
        "faults": dict(Counter(_kind_of(one.fault) for one in done)),
        "stalls": stalls_by_kind(ended, done),
    }


def as_json(held: dict[str, Held]) -> dict[str, Any]:
    """Plain values."""
    return {name: asdict(one) for name, one in held.items()}
