"""The search: the least nodes, the best split, the load that is carried, in few trials."""

from __future__ import annotations

import math

import pytest

from pdserve.planning.search import LEAST_LOAD, MOST_LOAD, PRECISION, Fleet, Search

WANTED = 0.9


class Played:
    """A cluster whose prefill and decode work need so many nodes; mixed ones lose `tax` of each."""

    def __init__(self, prefill: float, decode: float, tax: float = 0.2) -> None:
        self.prefill, self.decode, self.tax = prefill, decode, tax
        self.num_trials = 0

    def share(self, shape: Fleet, load: float) -> float:
        if shape.mixed:
            return shape.mixed * (1 - self.tax) / (load * (self.prefill + self.decode))
        return min(shape.prefill / (load * self.prefill), shape.decode / (load * self.decode))

    def score(self, shape: Fleet, load: float) -> float:
        """A share below what is wanted is a trial that was stopped, the sooner the worse."""
        self.num_trials += 1
        share = self.share(shape, load)
        return 0.95 if share >= 1 else share - 1


def search_of(played: Played, share: float = 0.5) -> Search:
    return Search(played.score, WANTED, share)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(0.5, 0.4), (2.5, 1.2), (1.2, 6.0), (11.3, 4.0), (40.0, 60.5)]
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("tax", [0.0, 0.3])
def test_the_least_nodes_and_their_best_split_are_found_in_few_trials(
    prefill: float, decode: float, share: float, tax: float
) -> None:
    played = Played(prefill, decode, tax)
    split_needs = math.ceil(prefill) + math.ceil(decode)
    mixed_needs = math.ceil((prefill + decode) / (1 - tax) - 1e-9)
    search = search_of(played, share)
    found = search.least(1, 512)
    assert found == min(split_needs, mixed_needs)
    best = search.best_split(max(found, split_needs))
    assert best is not None
    assert played.share(best, 1.0) >= 1
    grid = sum(total for total in range(1, found + 1))
    assert played.num_trials <= max(12, grid / 2)


def test_where_the_most_nodes_are_too_few_there_is_no_answer() -> None:
    assert search_of(Played(30.0, 30.0)).least(1, 16) is None


def test_a_search_may_begin_at_what_is_enough() -> None:
    played = Played(1.5, 1.5, 0.5)
    assert search_of(played).least(4, 512) == 4
    assert search_of(played).least(2, 512) == 4


def test_a_split_requires_two_nodes() -> None:
    assert search_of(Played(0.1, 0.1)).best_split(1) is None


@pytest.mark.parametrize("needs", [0.2, 0.5, 0.97, 1.3, 3.0, 9.0])
def test_the_load_that_is_carried_is_as_exact_as_promised(needs: float) -> None:
    played = Played(needs, needs)
    carried = search_of(played).carried(Fleet(1, 1))
    assert carried <= 1 / needs
    assert carried >= 1 / needs / (1 + PRECISION) - 1e-9


@pytest.mark.parametrize(("needs", "carried"), [(0.01, MOST_LOAD), (100.0, 0.0)])
def test_carrying_much_more_or_next_to_nothing_ends_the_search(
    needs: float, carried: float
) -> None:
    played = Played(needs, needs)
    found = search_of(played).carried(Fleet(1, 1))
    assert found == 0.0 if carried == 0.0 else MOST_LOAD / 1.5 < found <= MOST_LOAD
    assert played.num_trials <= 2 + math.log2(1 / LEAST_LOAD) + 4


def test_no_shape_is_tried_twice_at_one_load() -> None:
    played = Played(2.0, 2.0)
    search = search_of(played)
    for _ in range(2):
        search.least(1, 64)
        search.carried(Fleet(2, 2))
    assert played.num_trials == len(search.tried)


def test_shapes_have_names_and_roles() -> None:
    assert [str(Fleet(2, 3)), str(Fleet(mixed=4))] == ["2P + 3D", "4 mixed"]
    assert [role.value for role in Fleet(2, 3).num_nodes] == ["prefill", "decode"]
    assert (Fleet(2, 3).total, Fleet(mixed=4).total) == (5, 4)
