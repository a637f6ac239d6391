"""How many nodes of each role the targets want. Pure.

    prefill   arriving tokens a second / (what a node computes * BUSY)
              + what waits beyond the target, to be worked off in CATCH_UP_S
    decode    the largest of   blocks that are used or waited for / (a node's * FULL)
                               answers that run or wait           / (a node's seats * FULL)
                               the nodes at which a step takes no longer than the target
    mixed     the larger of both

`need` is not rounded. What is `desired` is at least 1, more than there are where the need is above
that, and less only where those that stay would be `FULL` at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from common.nodes import Role
from common.observing.latency import LatencyTargets
from router.core.scaling.measure import ROLES, Measured

BUSY = 0.85
"""The share of its time that a node computes prompts at most, if none is to wait long."""
FULL = 0.85
"""The share of its blocks or seats that a node uses at most: answers grow."""
CATCH_UP_S = 10.0
"""The time in which a queue is worked off that the nodes at hand would not finish in time."""
MOST_DESIRED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDemand:
    """How many nodes one role needs; `why` names the numbers that decide.

    `prefill_wait_s`: what the prompts that wait would take its nodes.
    """

    role: Role
    num_nodes: int
    need: float
    desired: int
    why: str
    prefill_wait_s: float
    measured: Measured

    @property
    def pressure(self) -> float:
        """The need per node that there is; infinite where there is a need and no node."""
        return pressure(self.need, self.num_nodes)


def pressure(need: float, num_nodes: int) -> float:
    """Return the need per node."""
    if num_nodes:
        return need / num_nodes
    return math.inf if need else 0.0


def demands(measured: Mapping[Role, Measured], targets: LatencyTargets) -> dict[Role, RoleDemand]:
    """Return what each role needs. Prefill and decode need one node each, if there is either."""
    return {role: _of_role(role, measured, targets) for role in ROLES}


def _of_role(role: Role, measured: Mapping[Role, Measured], targets: LatencyTargets) -> RoleDemand:
    own = measured[role]
    is_split = bool(measured[Role.PREFILL].num_nodes or measured[Role.DECODE].num_nodes)
    needs: list[tuple[float, str]] = []
    if role is not Role.DECODE:
        needs.append(_prefill_need(own, targets.ttft_s))
    if role is not Role.PREFILL:
        needs += _decode_needs(own, targets.tpot_s)
    if role is Role.PREFILL and not own.num_nodes and is_split:
        needs = [_prefill_need(measured[Role.DECODE], targets.ttft_s)]
    need, why = max(needs)
    least = 1 if (is_split if role is not Role.MIXED else own.num_nodes) else 0
    return RoleDemand(
        role=role,
        num_nodes=own.num_nodes,
        need=need,
        desired=max(least, _desired(need, own.num_nodes)),
        why=why,
        prefill_wait_s=_wait_s(own),
        measured=own,
    )


def _desired(need: float, num_nodes: int) -> int:
    if need > num_nodes:
        return min(MOST_DESIRED, math.ceil(need))
    return min(num_nodes, math.ceil(need / FULL))


def _wait_s(seen: Measured) -> float:
    speed = seen.node_tokens_per_s * seen.num_nodes
    return seen.queued_tokens / speed if speed else 0.0


def _prefill_need(seen: Measured, ttft_s: float) -> tuple[float, str]:
    speed = seen.node_tokens_per_s
    if not speed:
        # Nothing was computed yet: what there is is kept, if anything waits.
        need = float(seen.num_nodes) if seen.queued_tokens else 0.0
        return need, "no prompt was computed yet"
    late_tokens = max(0.0, seen.queued_tokens - speed * seen.num_nodes * ttft_s)
    need = seen.arriving_per_s / (speed * BUSY) + late_tokens / (speed * CATCH_UP_S)
    return need, (
        f"{seen.arriving_per_s:.0f} prompt tokens/s arrive, a node computes {speed:.0f}, "
        f"{seen.queued_tokens} wait ({_wait_s(seen):.2f} s of its nodes, target {ttft_s:g} s)"
    )


def _decode_needs(seen: Measured, tpot_s: float) -> list[tuple[float, str]]:
    blocks, seats = seen.used_blocks + seen.waiting_blocks, seen.num_running + seen.num_waiting
    needs = [
        (
            blocks / (seen.node_blocks * FULL) if seen.node_blocks else 0.0,
            f"{blocks:.0f} blocks are used or waited for, a node has {seen.node_blocks:.0f}",
        ),
        (
            seats / (seen.node_seats * FULL) if seen.node_seats else 0.0,
            f"{seats:.0f} answers run or wait, a node has {seen.node_seats:.0f} seats",
        ),
    ]
    if seen.step_s and seen.num_running:
        needs.append(_step_need(seen, seats, tpot_s))
    return needs


def _step_need(seen: Measured, seats: float, tpot_s: float) -> tuple[float, str]:
    """Return the nodes at which a step keeps the target: of its time, what is more than in the
    quickest step seen comes from what a node holds."""
    fixed_s = min(seen.least_step_s, tpot_s / 2)
    by_load_s = max(0.0, seen.step_s - fixed_s) * seats / seen.num_running
    need = seen.mean_nodes * by_load_s / (tpot_s - fixed_s)
    return need, (
        f"a step takes {1000 * seen.step_s:.1f} ms while {seen.num_running:.1f} answers run, and "
        f"{seats:.1f} run or wait (target {1000 * tpot_s:g} ms)"
    )
