"""The faults of a soak: every kind comes, and something of each role is always undisturbed."""

from __future__ import annotations

import pytest

from common.nodes import Role
from tests.soak.cluster import ROLES
from tests.soak.schedule import KINDS, STORE, draw_faults

LENGTH_S = 1800.0


@pytest.mark.parametrize("seed", range(5))
def test_one_of_each_role_is_undisturbed_at_any_time(seed: int) -> None:
    faults = draw_faults(seed, ROLES, until_s=LENGTH_S, every_s=20.0)
    for fault in faults:
        active = {f.target for f in faults if f.at_s <= fault.at_s < f.over_at_s}
        for role in (Role.PREFILL, Role.DECODE, Role.ROUTER):
            assert {name for name, its in ROLES.items() if its is role} - active
        assert fault.over_at_s < LENGTH_S


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_to_everything_that_it_can_be_done_to(seed: int) -> None:
    faults = draw_faults(seed, ROLES, until_s=LENGTH_S, every_s=20.0)
    assert len(faults) > 80
    done = {(f.kind, STORE if f.target == STORE else ROLES[f.target]) for f in faults}
    assert done == {(kind.name, target) for kind in KINDS for target in kind.targets}


def test_the_same_seed_draws_the_same_faults() -> None:
    first, again, other = (
        draw_faults(seed, ROLES, until_s=300.0, every_s=20.0) for seed in (1, 1, 2)
    )
    assert first == again != other
