"""The kinds of faults and of changes, and in which ways each may happen.

The module imports no package that serves, so that a bug can be planted anywhere in these.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

STORE = "store"


class FaultKind(Enum):
    """What is broken, or changed. `how` of a fault says in which way, where there are several.

    crash      a process ends, and starts again after `span_s` (0: never). `known`: its host says
               so at once; `silent`: the host is gone too; `renamed`: as `known`, and what starts
               has another name. A router loses its requests with it.
    freeze     a process stands still for `span_s`, and then goes on
    partition  messages between two wait for `span_s`: `both` ways, or `to` the second, or `from`
    loss       the connections between two break; messages on their way are lost
    repeat     the connections between two break; messages on their way to the second one arrive
               without its sender's knowledge, which sends them again
    clock      the clock of a process jumps ahead by `span_s`; of the store: leases expire earlier
    step       for `span_s` steps of a node fail for `all` or `some` of their sequences, for which
               they write wrong numbers; or each `copy` fails that is made beside the steps
    hang       the step of a node that runs, or the next one, does not end for `span_s`; the rest of
               its process goes on, and reports it
    store      the store is `away` for `span_s`, or `empty` from now on

    role       a router gives a node another role, as `pdserve role` does
    drain      a router drains a node, which starts again after `span_s` (0: never)
    upgrade    as `drain`, and the node starts again with the `new` revision or the `old` one; nodes
               of two revisions cannot use each other's KV
    disk       the files of a node's prefixes are `slow`, give an `error` or are `corrupt` for
               `span_s`; that costs hits, and nothing else
    """

    CRASH = "crash"
    FREEZE = "freeze"
    PARTITION = "partition"
    LOSS = "loss"
    REPEAT = "repeat"
    CLOCK = "clock"
    STORE = "store"
    STEP = "step"
    HANG = "hang"
    ROLE = "role"
    DRAIN = "drain"
    UPGRADE = "upgrade"
    DISK = "disk"


DRAINS = (FaultKind.DRAIN, FaultKind.UPGRADE)
"""The changes that drain a node."""
CHANGES = (FaultKind.ROLE, *DRAINS)
"""The changes that a router is asked for."""
HARMLESS = (*CHANGES, FaultKind.DISK)
"""The kinds that break nothing."""
BREAKING = tuple(one for one in FaultKind if one not in HARMLESS)
WAYS: Mapping[FaultKind, tuple[str, ...]] = {
    FaultKind.CRASH: ("known", "silent", "renamed"),
    FaultKind.FREEZE: ("",),
    FaultKind.PARTITION: ("both", "to", "from"),
    FaultKind.LOSS: ("",),
    FaultKind.REPEAT: ("",),
    FaultKind.CLOCK: ("",),
    FaultKind.STORE: ("away", "empty"),
    FaultKind.STEP: ("all", "some", "copy"),
    FaultKind.HANG: ("",),
    FaultKind.ROLE: ("prefill", "decode", "mixed"),
    FaultKind.DRAIN: ("",),
    FaultKind.UPGRADE: ("new", "old"),
    FaultKind.DISK: ("slow", "error", "corrupt"),
}
OF_STEPS = (FaultKind.STEP, FaultKind.HANG)
"""The kinds that happen in the steps of a node."""
BREAKS = (FaultKind.LOSS, FaultKind.REPEAT)
"""The kinds that end connections."""
BETWEEN_TWO = (FaultKind.PARTITION, *BREAKS)
GRAMMARS = ("quick", "slow", "slower", "late", "refused")
"""The grammars of requests: how long a node compiles one, or why it does not follow it."""
