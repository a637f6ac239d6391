"""The shares of accepted drafts in bench.speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.speculation.__main__ import Measured, SameAnswers, Serving, measure
from engine.core.runner_contract import DrawnTokens, StepCosts
from tests.support.models.mtp_running import load_with_mtp, step, write_inside
from tests.support.models.tiny_checkpoints import prompt_of

MOST_DRAFTS = 5
"""Most drafts of mtp, unless a setting says otherwise."""


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    measured = Measured(decode_s=1.0, num_tokens=9, num_sequence_steps=4)
    known, table = prompt_of(4), range(4)
    drafts: tuple[list[int], ...] = ([7, 7, 7], [7, 7, 7], [7], [])
    drawn = ((7, 3), (7, 7, 7, 4), (5,), (6,))
    batch = [step(known, 3, table, ones) for ones in drafts]
    measured.verified(batch, [DrawnTokens(ones) for ones in drawn])
    measured.verified([step(known, 3, table)], [None])
    found = measured.figures(measured)
    assert found["drafts_verified"] == [3, 2, 1]
    assert found["drafts_accepted"] == [0.667, 0.5, 1.0]


def test_no_drafts_have_no_share() -> None:
    measured = Measured(decode_s=1.0, num_tokens=1, num_sequence_steps=1)
    measured.verified([step(prompt_of(4), 3, range(4))], [DrawnTokens((1,))])
    assert measured.figures(measured)["drafts_accepted"] == []


@pytest.mark.parametrize("always_draft", [False, True])
def test_every_step_verifies_the_layer_s_drafts_where_they_cost_nothing(
    tmp_path: Path, *, always_draft: bool
) -> None:
    """Where they cost as much as tokens, only a probe now and then does."""
    runner = load_with_mtp(write_inside(tmp_path, "mimo"), max_num_batched_tokens=64)
    runner._step_costs = StepCosts((1, 64), (1.0, 64.0), draft_s=1.0)
    serving = [
        Serving(runner, "none", 0, 40),
        Serving(runner, "mtp", 40, 40, always_draft=always_draft),
    ]
    measure(serving, [tuple(prompt_of(20)), tuple(prompt_of(20, 1))], 1, 24, SameAnswers())
    plain, drafting = (one.measured for one in serving)
    assert not plain.num_verified
    assert plain.num_tokens == drafting.num_tokens > 0
    assert sum(drafting.num_accepted.values()) >= drafting.num_tokens - drafting.num_sequence_steps
    if always_draft:
        # At the end of an answer there is no room for a draft.
        assert drafting.num_sequence_steps - 2 <= drafting.num_verified[0]
        assert max(drafting.num_verified) < MOST_DRAFTS
    else:
        assert drafting.num_verified[0] < drafting.num_sequence_steps / 4
