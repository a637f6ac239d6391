"""Histories with faults on the code that serves, and the bugs that they must find."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from simulator.faults.cluster import FaultyCluster
from simulator.faults.search import ALL, history_of, quiet, wrong_histories
from tests.simulation.planted_bugs import BUGS, ROOT, histories_until_found
from tests.support.examples import everyday

NUM_HISTORIES = everyday(4, of=400)
FIRST_SEED = 1000
QUICKLY_FOUND = (
    "decoding begins with another token than the one that was drawn",
    "a leg that ends is counted on",
    "a landing that is given up is not closed",
    "blocks are findable before they are computed",
)
_DIGEST = """
from hashlib import sha256
from simulator.faults.cluster import FaultyCluster
from simulator.faults.router import FaultyRouter
from simulator.faults.search import ALL, history_of, quiet

heard, take = sha256(), FaultyRouter.on_message

def on_message(router, node, said, **more):
    heard.update(f"{router.clock.now_s()} {node} {said}".encode())
    take(router, node, said, **more)

FaultyRouter.on_message = on_message
with quiet():
    for seed in (2, 3, 17):
        cluster = FaultyCluster(history_of(seed, ALL))
        cluster.run()
        print(cluster.timeline.num_handled, cluster.timeline.now_s(), cluster.outcomes())
print(heard.hexdigest())
"""
"""Seed 17 has nodes that see what others have written to a disk."""


def test_nothing_is_wrong_in_histories_with_faults() -> None:
    with quiet():
        seeds = range(FIRST_SEED, FIRST_SEED + NUM_HISTORIES)
        for found in wrong_histories(seeds, ALL):
            assert found is None, f"seed {found.history.seed}: {found.wrong}"


def test_nothing_is_wrong_where_nodes_are_asked_and_chosen_as_some_of_many() -> None:
    with quiet():
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_HISTORIES):
            history = history_of(seed, ALL)
            shape = replace(history.shape, is_wide=True)
            FaultyCluster(replace(history, shape=shape)).run()


def test_a_history_is_the_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_every_planted_bug_has_its_place_in_the_source() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 25
    for bug in BUGS:
        text = (ROOT / (bug.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert text.count(bug.old) == 1, bug.name
        assert bug.new not in ("", bug.old)


@pytest.mark.parametrize("name", QUICKLY_FOUND[: everyday(2, of=4)])
def test_planted_bugs_are_found(name: str) -> None:
    bug = next(one for one in BUGS if one.name == name)
    found = histories_until_found(bug, most=20, seed=0)
    assert found.wrong, f"not found in {found.num_histories} histories"
