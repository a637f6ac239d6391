"""The everyday share of what `make fuzz-kv` does with a million frames."""

from __future__ import annotations

from tests.property.kv_transfer.kv_fuzz import run
from tests.support.examples import everyday


def test_frames_by_the_ten_thousand() -> None:
    counts = run(everyday(15_000, of=50_000), seed=7)
    receiver, sender = counts["receiver"], counts["sender"]
    assert isinstance(receiver, dict)
    assert isinstance(sender, dict)
    # The walk reaches what it is about: nothing below would be found by frames that are all bad.
    assert min(receiver.values()) > 20
    assert min(sender.values()) > 20
