"""When an output is complete."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import FinishReason, SamplingParams
from engine.core.stop_rules import finish_reason_after

EOS = 2


@pytest.mark.parametrize(
    ("token", "num_output", "num_known", "sampling", "expected"),
    [
        (5, 1, 10, {}, None),
        (EOS, 1, 10, {}, FinishReason.STOP),
        (EOS, 1, 10, {"ignore_eos": True}, None),
        (EOS, 8, 10, {"ignore_eos": True}, FinishReason.LENGTH),
        (EOS, 1, 10, {"ignore_eos": True, "stop_token_ids": (EOS,)}, FinishReason.STOP),
        (9, 1, 10, {"stop_token_ids": (8, 9)}, FinishReason.STOP),
        (7, 1, 10, {"stop_token_ids": (8, 9)}, None),
        (5, 7, 10, {}, None),
        (5, 8, 10, {}, FinishReason.LENGTH),
        (EOS, 8, 10, {}, FinishReason.STOP),
        (5, 1, 99, {}, None),
        (5, 1, 100, {}, FinishReason.LENGTH),
        (EOS, 1, 100, {}, FinishReason.STOP),
        (5, 1, 10, {"max_tokens": 1}, FinishReason.LENGTH),
        (EOS, 1, 10, {"max_tokens": 1}, FinishReason.STOP),
    ],
)
def test_the_reason_after_a_token(
    token: int,
    num_output: int,
    num_known: int,
    sampling: dict[str, Any],
    expected: FinishReason | None,
) -> None:
    reason = finish_reason_after(
        token,
        num_output=num_output,
        num_known=num_known,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        eos_token_ids=frozenset({EOS, 3}),
        max_model_len=100,
    )
    assert reason is expected
