"""Which fault comes when: drawn from a seed, and never one that leaves no possible node."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
    def over_at_s(self) -> float:
        """When the target should work as before."""
        return self.at_s + self.lasts_s + RECOVERY_S


def draw_faults(
    seed: int, roles: Mapping[str, Role], *, until_s: float, every_s: float
) -> list[Fault]:
    """Draw one fault every `every_s` seconds.

    Of each role at least one process is undisturbed at any time. Each kind is drawn once before
    any is drawn again, as far as its targets allow.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    waiting: list[Kind] = []
    at_s = every_s / 2
    while at_s + every_s < until_s:
        if not waiting:
            waiting = rng.sample(KINDS, len(KINDS))
        for kind in waiting:
            targets = _possible(kind, roles, [f for f in faults if f.over_at_s > at_s])
            if targets and at_s + kind.lasts_s + RECOVERY_S < until_s:
                faults.append(Fault(kind.name, rng.choice(targets), at_s, kind.lasts_s))
                waiting.remove(kind)
                break
        else:
            waiting = []
        at_s += every_s
    return faults


def _possible(kind: Kind, roles: Mapping[str, Role], active: Sequence[Fault]) -> list[str]:
    disturbed = {fault.target for fault in active}
    if STORE in kind.targets:
        return [] if STORE in disturbed else [STORE]
    possible = []
    for name, role in sorted(roles.items()):
        others = [other for other, its in roles.items() if its is role and other != name]
        if role in kind.targets and name not in disturbed and not disturbed & set(others):
            possible.append(name)
    return possible
