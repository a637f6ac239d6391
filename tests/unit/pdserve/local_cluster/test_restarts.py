"""When a node that died is started again, and when no more."""

from __future__ import annotations

from pdserve.local_cluster.restarts import GOOD_AFTER_S, MOST_TRIES, Restarts


def test_pauses_grow_and_tries_end() -> None:
    restarts, now_s = Restarts(), 100.0
    assert restarts.next_at_s() is None
    for number, pause_s in enumerate((1.0, 2.0, 4.0, 8.0, 16.0), 1):
        said = restarts.after_death("d", now_s)
        assert said == f"d is started again in {pause_s:g} s, try {number} of {MOST_TRIES}."
        assert restarts.next_at_s() == now_s + pause_s
        assert restarts.take_due(now_s + pause_s - 0.01) == []
        now_s += pause_s
        assert restarts.take_due(now_s) == ["d"]
        assert restarts.take_due(now_s) == []
    assert restarts.after_death("d", now_s) == ""
    assert restarts.next_at_s() is None
    assert restarts.take_due(now_s + 1000) == []


def test_nodes_have_tries_of_their_own() -> None:
    restarts = Restarts()
    restarts.after_death("a", 0.0)
    restarts.after_death("b", 0.5)
    assert restarts.next_at_s() == 1.0
    assert restarts.take_due(1.0) == ["a"]
    assert restarts.next_at_s() == 1.5
    assert restarts.take_due(2.0) == ["b"]
    assert "in 2 s, try 2" in restarts.after_death("a", 3.0)


def test_a_node_that_ran_long_has_all_of_its_tries_again() -> None:
    restarts = Restarts()
    restarts.after_death("a", 0.0)
    restarts.take_due(1.0)
    assert "try 2" in restarts.after_death("a", 1.0 + GOOD_AFTER_S - 0.1)
    restarts.take_due(1000.0)
    assert "try 1" in restarts.after_death("a", 1000.0 + GOOD_AFTER_S)
