"""Which fault comes when: drawn from a seed, and never one that leaves no possible node."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from dataclasses import dataclass

from common.nodes import Role

STORE = "store"
RECOVERY_S = 12.0
"""After its end a fault still counts as one: its target may not have everything again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: its length, and what it can be done to (`STORE` is not a role)."""

    name: str
    lasts_s: float
    targets: tuple[Role | str, ...]


_NODES: tuple[Role | str, ...] = (Role.PREFILL, Role.DECODE)
_ALL: tuple[Role | str, ...] = (*_NODES, Role.ROUTER)

KINDS = (
    Kind("kill", 5.0, _NODES),
    Kind("restart", 0.0, _NODES),
    Kind("freeze_1_s", 1.0, _ALL),
    Kind("freeze_10_s", 10.0, _ALL),
    Kind("freeze_60_s", 60.0, _ALL),
    Kind("network_cut", 8.0, _NODES),
    Kind("network_cut_to_node", 8.0, _NODES),
    Kind("network_cut_from_node", 8.0, _NODES),
    Kind("network_delay", 10.0, _NODES),
    Kind("dead_kv_port", 10.0, (Role.DECODE,)),
    Kind("drain", 0.0, _ALL),
    Kind("store_frozen", 10.0, (STORE,)),
    Kind("store_killed", 5.0, (STORE,)),
    Kind("store_flushed", 0.0, (STORE,)),
    Kind("store_read_only", 15.0, (STORE,)),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what, to whom, and when, in seconds after the start."""

    kind: str
    target: str
    at_s: float
    lasts_s: float

    @property
    def is_freeze(self) -> bool:
        """Whether its target stands still meanwhile."""
        return self.kind.startswith("freeze_")

    @property
    def over_at_s(self) -> float:
        """When the target should work as before."""
        return self.at_s + self.lasts_s + RECOVERY_S


def draw_faults(
    seed: int, roles: Mapping[str, Role], *, until_s: float, every_s: float
) -> list[Fault]:
    """Draw one fault every `every_s` seconds.

    Of each role at least one process is undisturbed at any time. Each kind is done once to each
    of its targets before any is done again, as far as what is disturbed already allows.
    """
    rng = random.Random(seed)
    cases = [(kind, target) for kind in KINDS for target in kind.targets]
    faults: list[Fault] = []
    waiting: list[tuple[Kind, Role | str]] = []
    at_s = every_s / 2
    while at_s + every_s < until_s:
        waiting = waiting or rng.sample(cases, len(cases))
        disturbed = {fault.target for fault in faults if fault.over_at_s > at_s}
        for kind, target in waiting:
            possible = _possible(target, roles, disturbed)
            if possible and at_s + kind.lasts_s + RECOVERY_S < until_s:
                faults.append(Fault(kind.name, rng.choice(possible), at_s, kind.lasts_s))
                waiting.remove((kind, target))
                break
        at_s += every_s
    return faults


def _possible(target: Role | str, roles: Mapping[str, Role], disturbed: Set[str]) -> list[str]:
    """Return the processes that a fault can be done to now."""
    if target == STORE:
        return [] if STORE in disturbed else [STORE]
    names = sorted(name for name, role in roles.items() if role is target)
    return [] if disturbed & set(names) else names
