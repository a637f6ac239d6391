"""`pdserve drain` waits for the life of the node that it asked, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.commands import cluster_status
from pdserve.commands.drain_command import SPARE_S, DrainFailed, LeavingNode, wait_until_gone
from tests.support.clocks.manual_clock import ManualClock

LEAVING = LeavingNode("decode-1", 7, 30.0)


def listed(epoch: int = 7, **load: Any) -> dict[str, Any]:
    node = {"node_id": "decode-1", "epoch": epoch, "num_running": 2, "num_waiting": 0, **load}
    return {"nodes": [{"node_id": "decode-2", "epoch": 7}, node]}


class Router:
    """Gives one listing after the other, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *listings: dict[str, Any]) -> None:
        self.clock = ManualClock()
        self._listings = list(listings)
        monkeypatch.setattr(cluster_status, "fetch_json", self._fetch)

    def _fetch(self, *_: object, **__: object) -> dict[str, Any]:
        return self._listings.pop(0) if len(self._listings) > 1 else self._listings[0]

    def wait(self) -> float:
        return wait_until_gone("http://h:1", LEAVING, self.clock, pause=self.clock.advance)


def test_it_says_what_is_left_whenever_that_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two, one = listed(), listed(num_running=1, num_waiting=3)
    router = Router(monkeypatch, two, two, one, {"nodes": []})
    assert router.wait() == 1.5
    assert capsys.readouterr().err == (
        "decode-1: 2 running, 0 waiting\ndecode-1: 1 running, 3 waiting\n"
    )


def test_a_later_life_of_the_node_means_that_this_one_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Router(monkeypatch, listed(), listed(epoch=8)).wait() == 0.5


def test_a_node_that_stays_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(monkeypatch, listed())
    with pytest.raises(DrainFailed, match=r"decode-1 is still listed after 5\d s, 30 s of which"):
        router.wait()
    assert router.clock.now_s() > LEAVING.timeout_s + SPARE_S
