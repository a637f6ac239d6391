"""A team's phases: every share is done once, with any number of threads, late ones included."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from numba import njit

from engine.runner.kernels.team import claim, finish, new_progress, run_team, wait_for_all

NUM_PHASES, NUM_SHARES = 40, 23


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _add_up(progress, values) -> None:  # type: ignore[no-untyped-def]
    """Each share of a phase adds all shares of the phase before it; the first is all ones."""
    for phase in range(values.shape[0]):
        share = claim(progress[phase])
        while share < values.shape[1]:
            values[phase, share] += 1.0 if phase == 0 else values[phase - 1].mean() + 1.0
            finish(progress[phase])
            share = claim(progress[phase])
        wait_for_all(progress[phase], values.shape[1])


def wanted() -> np.ndarray:
    return np.repeat(np.arange(1.0, NUM_PHASES + 1)[:, None], NUM_SHARES, axis=1)


@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_phases_follow_each_other_and_every_share_is_done_once(num_members: int) -> None:
    for _ in range(20):
        progress, values = new_progress(NUM_PHASES), np.zeros((NUM_PHASES, NUM_SHARES))
        members = [
            threading.Thread(target=_add_up, args=(progress, values)) for _ in range(num_members)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
        np.testing.assert_array_equal(values, wanted())


def test_a_member_that_comes_after_the_end_finds_nothing_to_do() -> None:
    progress, values = new_progress(NUM_PHASES), np.zeros((NUM_PHASES, NUM_SHARES))
    _add_up(progress, values)
    _add_up(progress, values)
    np.testing.assert_array_equal(values, wanted())


def test_nobody_goes_on_while_a_share_is_held() -> None:
    progress, values = new_progress(2), np.zeros((2, NUM_SHARES))
    assert claim(progress[0]) == 0
    other = threading.Thread(target=_add_up, args=(progress, values))
    other.start()
    wait_for_all(progress[0], NUM_SHARES - 1)  # all but the held one
    assert not values[1].any()
    values[0, 0] = 1.0
    finish(progress[0])
    other.join()
    np.testing.assert_array_equal(values, wanted()[:2])


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _note(member, values, added) -> None:  # type: ignore[no-untyped-def]
    values[member] += added


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _fail(member, values) -> None:  # type: ignore[no-untyped-def]
    if member == values[0]:
        raise MemoryError("no room")
    values[1 + member] += 1.0


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _team_of(num_members, values, added) -> None:  # type: ignore[no-untyped-def]
    run_team(_note, num_members, (values, added))


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _failing_team(num_members, values) -> None:  # type: ignore[no-untyped-def]
    run_team(_fail, num_members, (values,))


@pytest.mark.parametrize("num_members", [1, 2, 7])
def test_every_member_of_a_team_is_called_once_with_the_arguments(num_members: int) -> None:
    values = np.zeros(8)
    _team_of(num_members, values, 2.5)
    np.testing.assert_array_equal(values, [2.5] * num_members + [0.0] * (8 - num_members))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_member_that_fails_is_an_error_of_the_team(failing: int) -> None:
    values = np.array([float(failing), 0.0, 0.0])
    with pytest.raises(MemoryError, match="kernel"):
        _failing_team(2, values)
    assert values[2 - failing] == 1.0
    values[0] = -1.0
    _failing_team(2, values)  # the next one is not affected
    assert values[1 + failing] == 1.0


LOAD = """
import os
from pathlib import Path
import engine.runner.kernels
print("libgomp" in Path("/proc/self/maps").read_text())
print(os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("configured", "found"),
    [
        ({}, ["passive", "1000"]),
        ({"GOMP_SPINCOUNT": "7"}, ["passive", "7"]),
        ({"OMP_WAIT_POLICY": "active"}, ["active", "None"]),
    ],
)
def test_idle_threads_sleep_soon_unless_configured(
    configured: dict[str, str], found: list[str]
) -> None:
    """The policy is chosen before the thread pool's library is loaded, which reads it once."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {k: v for k, v in os.environ.items() if k not in names} | configured
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", *found]
