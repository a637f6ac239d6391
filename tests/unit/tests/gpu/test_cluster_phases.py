"""What the program that measures a cluster on one card makes of answers and of its time."""

from __future__ import annotations

import json
import time

import pytest

from tests.gpu.cluster.phases import Said, require_same, steady
from tests.gpu.cluster.streams import Answer, AnswerFailed, Asked, read_answer
from tests.gpu.cluster.timed import OutOfTime, Phases, limited

ASKED = Asked(prompt=[1], max_tokens=3, fields={})
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def event(*tokens: int) -> bytes:
    logprobs = {"token_logprobs": [-token / 4 for token in tokens]}
    choice = {"text": "x", "token_ids": tokens, "logprobs": logprobs}
    return b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()


def test_answers_that_differ_are_told_with_their_places() -> None:
    first: Said = ((1, None), (2, None))
    require_same([first, ((3, -0.5), (4, -1.5))], [first, ((3, -0.5), (4, -1.5))])
    with pytest.raises(AssertionError, match=r"after how many tokens: \{1: 1\}$"):
        require_same([first, ((3, -0.5), (4, -1.5))], [first, ((3, -0.5), (4, -1.25))])
    with pytest.raises(ValueError, match="longer"):
        require_same([first], [first, first])


def test_gaps_are_of_the_time_in_which_all_streams_decode() -> None:
    early = Answer(tokens=(1,) * 4, asked_at_s=0, at_s=(1.0, 2.0, 2.010, 2.030))
    late = Answer(tokens=(1,) * 3, asked_at_s=0, at_s=(2.0, 2.010, 3.0))
    found = steady([early, late])
    assert found == {
        "steady": 3, "median": 10.0, "least": 10.0, "most": 20.0, "mean": 13.33, "p99": 10.0,
        "longest": 1000.0,
    }  # fmt: skip
    apart = Answer(tokens=(1,) * 2, asked_at_s=0, at_s=(5.0, 6.0))
    assert steady([early, apart]) == {"steady": 0, "longest": 1000.0}


def test_tokens_have_the_time_of_the_piece_in_which_their_event_ended() -> None:
    first, second = event(7), event(8, 9)
    pieces = [
        (1.0, HEAD + first[:10]), (2.0, first[10:] + second[:30]), (3.0, second[30:] + END),
    ]  # fmt: skip
    answer = read_answer(ASKED, 0.5, pieces)
    assert (answer.tokens, answer.at_s, answer.first_s) == ((7, 8, 9), (2.0, 3.0, 3.0), 1.5)
    assert answer.logprobs == (-1.75, -2.0, -2.25)


@pytest.mark.parametrize(
    ("came", "words"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n{}", "503 Busy"),
        (HEAD + event(1, 2, 3), "HTTP/1.1 200"),
        (HEAD + event(1, 2) + END, "2 tokens: wanted 3"),
        (HEAD + b'data: {"error": {"code": "node_lost"}}\n\n' + END, "node_lost"),
    ],
)
def test_an_answer_that_is_not_whole_fails(came: bytes, words: str) -> None:
    with pytest.raises(AnswerFailed, match=words):
        read_answer(ASKED, 0.0, [(1.0, came)])


def test_a_phase_that_takes_too_long_ends_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended: list[str] = []
    phases = Phases(0.1, lambda: ended.append("one"))
    assert not phases.run("slow", 0.05, lambda: time.sleep(60))
    assert not phases.run("late", 60, lambda: time.sleep(60))
    assert phases.run("closing", 60, lambda: {"found": 1}, is_closing=True)
    assert (phases.passed, phases.failed, len(ended)) == (1, ["slow", "late"], 3)
    assert "== closing: ok (0.0 s) {'found': 1}" in capsys.readouterr().out
    with pytest.raises(OutOfTime, match="not within 0 s"), limited(0.01):
        time.sleep(60)
