"""What a rollout has shown: the ends of requests, the stalls, and who worked with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.soak.clients import Ended, Try, outcomes
from tests.upgrade.handoffs import Handoffs
from tests.upgrade.rollout import Replaced

USUAL_GAP_S = 0.2
"""A stall begins with the last token before its cause."""


def complaints(ended: Sequence[Ended], done: Sequence[Replaced], handoffs: Handoffs) -> list[str]:
    """Return what was not as the documents say."""
    began_s = done[0].stopped_s if done else 0.0
    found = [f"{_described(one, began_s)}: {one.failure}" for one in ended if one.failure]
    found += [
        f"{_described(one, began_s)}: router-{refused.router} refused it at "
        f"{refused.began_s - began_s:.1f} s and was not being replaced"
        for one in ended
        for refused in one.refused
        if not _is_replaced(done, refused)
    ]
    found += [
        f"no request was in progress when {one.name} was stopped"
        for one in done
        if not _during(ended, one)
    ]
    found += [f"{pair} cannot exchange KV and were paired" for pair in handoffs.misfits()]
    return found + handoffs.missing()


def summary(ended: Sequence[Ended], done: Sequence[Replaced], handoffs: Handoffs) -> dict[str, Any]:
    """Return the figures of a rollout."""
    return {
        **outcomes(ended),
        "replaced": [_figures(ended, one, done[0].stopped_s) for one in done],
        "chosen": {
            f"router {trio.router}, prefill {trio.prefill}, decode {trio.decode}": count
            for trio, count in sorted(handoffs.chosen().items())
        },
        "kv_bytes": {
            f"prefill {prefill}, decode {decode}": num_bytes
            for (prefill, decode), num_bytes in sorted(handoffs.handed_off().items())
        },
    }


def _described(one: Ended, began_s: float) -> str:
    since_s, until_s = one.began_s - began_s, one.ended_s - began_s
    return f"{one.kind} from {since_s:.1f} s to {until_s:.1f} s, {one.num_tokens} tokens"


def _is_replaced(done: Sequence[Replaced], refused: Try) -> bool:
    """Return whether a router was being replaced when it refused a request."""
    return any(
        one.name == f"router-{refused.router}"
        and one.stopped_s < refused.ended_s
        and refused.began_s < one.ready_s
        for one in done
    )


def _during(ended: Sequence[Ended], one: Replaced) -> list[Ended]:
    """Return the requests that were in progress when a process was stopped."""
    return [answer for answer in ended if answer.began_s < one.stopped_s < answer.ended_s]


def _figures(ended: Sequence[Ended], one: Replaced, began_s: float) -> dict[str, Any]:
    stalls = [
        to - since
        for answer in ended
        for since, to in answer.stalls
        if one.stopped_s - USUAL_GAP_S < since < one.ready_s
    ]
    return {
        "name": one.name,
        "to": one.release,
        "at_s": round(one.stopped_s - began_s, 1),
        "requests": len(_during(ended, one)),
        "drain_s": round(one.exited_s - one.stopped_s, 1),
        "start_s": round(one.ready_s - one.exited_s, 1),
        "longest_stall_s": round(max(stalls, default=0.0), 2),
    }
