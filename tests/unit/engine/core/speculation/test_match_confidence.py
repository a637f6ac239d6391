"""How sure a looked-up token is, by the length of the match before it."""

from __future__ import annotations

import pytest

from engine.core.speculation.match_confidence import LONGEST, MatchConfidence


def test_longer_matches_are_surer_and_chances_fall_along_the_draft() -> None:
    confidence = MatchConfidence()
    assert confidence.chances(0, 3) == ()
    assert confidence.chances(1, 1) == (0.25,)
    assert confidence.chances(2, 3) == pytest.approx((1 / 2, 1 / 2 * 2 / 3, 1 / 2 * 2 / 3 * 3 / 4))
    assert confidence.chances(2, 3, 0.3) == pytest.approx((1 / 2, 1 / 3))
    assert confidence.chances(LONGEST + 9, 1) == confidence.chances(LONGEST, 1)


@pytest.mark.parametrize("length", [1, 2, LONGEST - 1, LONGEST, LONGEST + 7])
def test_what_is_learnt_counts_for_matches_of_that_length(length: int) -> None:
    before, after = MatchConfidence(), MatchConfidence()
    after.learn(length, was_right=False)
    for other in range(1, LONGEST + 1):
        (old,), (new,) = before.chances(other, 1), after.chances(other, 1)
        assert (new < old) == (other == min(length, LONGEST))
    lowered = after.chances(length, 1)
    after.learn(length, was_right=True)
    assert after.chances(length, 1) > lowered
