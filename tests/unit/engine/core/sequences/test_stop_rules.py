"""When an output is complete."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import FinishReason, SamplingParams
from engine.core.sequences.stop_rules import end_tokens, until_end, withheld_token_ids

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
    drawn = (token,)
    assert end_of(drawn, num_output - 1, num_known - 1, sampling) == (drawn, expected)


@pytest.mark.parametrize(
    ("tokens", "num_output", "num_known", "sampling", "kept", "expected"),
    [
        ([5, 6, 7], 1, 10, {}, [5, 6, 7], None),
        ([5, EOS, 7], 1, 10, {}, [5, EOS], FinishReason.STOP),
        ([5, EOS, 3], 1, 10, {"ignore_eos": True}, [5, EOS, 3], None),
        ([9, EOS, 7], 1, 10, {"stop_token_ids": (9,)}, [9], FinishReason.STOP),
        ([5, 6, 7], 6, 10, {}, [5, 6], FinishReason.LENGTH),
        ([5, 6, EOS], 6, 10, {}, [5, 6], FinishReason.LENGTH),
        ([5, 6, 7], 1, 98, {}, [5, 6], FinishReason.LENGTH),
        ([5, EOS, 7], 1, 98, {}, [5, EOS], FinishReason.STOP),
    ],
)
def test_what_was_drawn_behind_the_end_is_dropped(
    tokens: list[int],
    num_output: int,
    num_known: int,
    sampling: dict[str, Any],
    kept: list[int],
    expected: FinishReason | None,
) -> None:
    drawn = tuple(tokens)
    assert end_of(drawn, num_output, num_known, sampling) == (drawn[: len(kept)], expected)


def test_the_tokens_that_end_an_output_are_the_models_and_the_requests() -> None:
    for given, ends in (
        ({}, {EOS, 3}),
        ({"stop_token_ids": (9, 8)}, {EOS, 3, 8, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": (EOS, 9)}, {EOS, 9}),
    ):
        params = SamplingParams(max_tokens=8, **given)
        assert end_tokens(params, frozenset({EOS, 3})) == ends


@pytest.mark.parametrize(
    ("sampling", "output_index", "withheld"),
    [
        ({}, 0, set()),
        ({"stop_token_ids": (9,)}, 0, set()),
        ({"min_tokens": 3}, 0, {EOS, 3}),
        ({"min_tokens": 3}, 2, {EOS, 3}),
        ({"min_tokens": 3}, 3, set()),
        ({"min_tokens": 3, "stop_token_ids": (9, 8)}, 2, {EOS, 3, 8, 9}),
        ({"min_tokens": 3, "stop_token_ids": (9, 8)}, 3, set()),
        ({"min_tokens": 1, "ignore_eos": True}, 0, {EOS, 3}),
        ({"min_tokens": 1, "ignore_eos": True}, 1, set()),
    ],
)
def test_what_would_end_an_output_is_withheld_before_its_least_length(
    sampling: dict[str, Any], output_index: int, withheld: set[int]
) -> None:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    assert set(withheld_token_ids(params, output_index, frozenset({EOS, 3}))) == withheld


def end_of(
    drawn: tuple[int, ...], num_output: int, num_known: int, sampling: dict[str, Any]
) -> tuple[tuple[int, ...], FinishReason | None]:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return until_end(
        drawn,
        num_prompt=num_known - num_output,
        num_known=num_known,
        max_tokens=params.max_tokens,
        end_token_ids=end_tokens(params, frozenset({EOS, 3})),
        max_model_len=100,
    )
