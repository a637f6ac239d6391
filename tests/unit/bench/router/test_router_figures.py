"""What bench.router counts and reports."""

from __future__ import annotations

import pytest

from bench.router.load import LoadResult, figures, num_token_events, quantile
from bench.router.node_stand_in import NUM_ANSWERS, answers


def event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


ROLE, USAGE, REASON = event("role"), event('{"completion_tokens":2,"x":1}'), event("length")
WHOLE = ROLE + event("one") + event("two") + REASON + USAGE + event("[DONE]")


def test_events_with_text_are_counted() -> None:
    assert num_token_events(WHOLE, 2) == 2
    assert num_token_events(WHOLE.replace(event("two"), b""), 2) == 1, "two tokens in one event"


@pytest.mark.parametrize(
    "answer", [WHOLE[: -len(event("[DONE]"))], WHOLE.replace(b":2,", b":1,"), b""]
)
def test_an_answer_that_is_not_whole_is_no_answer(answer: bytes) -> None:
    with pytest.raises(RuntimeError, match="not a whole answer of 2 tokens"):
        num_token_events(answer, 2)


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_quantile_is_one_of_the_values(share: float, wanted: float) -> None:
    assert quantile([4.0, 2.0, 1.0, 3.0], share) == wanted


def test_figures() -> None:
    load = LoadResult(
        num_requests=4, num_tokens=256, num_token_events=128, seconds=2.0, ttft_s=[0.001] * 4
    )
    assert figures(load, {"router": 1.0, "nodes": 0.5}) == {
        "tokens_per_s": 128,
        "requests_per_s": 2.0,
        "tokens_per_event": 2.0,
        "ttft_added_ms_p50": 1.0,
        "ttft_added_ms_p99": 1.0,
        "cpu_s_per_1k_requests": 250.0,
        "cpu_share": {"router": 0.5, "nodes": 0.25},
    }


def test_answers_are_pieces_of_the_text_of_full_length() -> None:
    token_ids = list(range(1000))
    pieces = answers(token_ids, 64)
    assert len(pieces) == NUM_ANSWERS
    assert all(len(piece) == 64 and piece == token_ids[piece[0] :][:64] for piece in pieces)
    with pytest.raises(ValueError, match="too short"):
        answers(token_ids[:100], 64)
