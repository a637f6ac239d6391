"""What the program that measures a cluster on one card makes of answers, and of what goes wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.gpu import cluster_on_card
from tests.gpu.cluster.phases import Said, require_same, steady
from tests.gpu.cluster.shapes import LARGE, WIDE, WIDE_CARD_MIB, Shape
from tests.gpu.cluster.streams import Answer, AnswerFailed, Asked, read_answer

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


@pytest.mark.parametrize(("shape", "card_mib"), [(LARGE, 80_000), (WIDE, WIDE_CARD_MIB)])
def test_all_streams_of_a_shape_fit_on_its_card_at_a_time(shape: Shape, card_mib: int) -> None:
    """And a stream is still answered when the last prompt is in."""
    flags = dict(zip(shape.flags[::2], shape.flags[1::2], strict=True))
    text = flags["--kv-cache-memory"]
    cache = int(text[:-3]) * {"MiB": 1 << 20, "GiB": 1 << 30}[text[-3:]]
    one = shape.config
    token_bytes = 4 * one["num_key_value_heads"] * one["head_dim"] * one["num_hidden_layers"]
    for count, streamed in shape.streamed_tokens.items():
        length = shape.context - streamed // 2
        assert count <= int(flags["--max-num-seqs"])
        assert count * (length + streamed) * token_bytes <= cache
        # On an H100 40 tokens of a prompt take a millisecond, and a step takes 5.8. Two nodes that
        # compute take turns.
        assert 2 * count * length / 40 < 2 * 5.8 * streamed
    weights, others = 16.4e9, 2e9
    assert 3 * (cache + weights) + others < card_mib << 20


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


class Broken:
    """In place of the clusters of a shape: what is done in one `place` goes wrong."""

    place = ""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._at("made")

    def _at(self, place: str) -> None:
        if place == self.place:
            raise ProcessLookupError(place)

    def start(self) -> None:
        self._at("start")

    def stop(self) -> None:
        self._at("stop")

    def close(self) -> None:
        self._at("close")

    def left(self) -> list[int]:
        self._at("left")
        return []

    def last_words(self) -> str:
        self._at("last words")
        return "the last words"


@contextmanager
def no_store(**options: Any) -> Iterator[None]:
    """In place of a store."""
    if Broken.place == "store":
        raise RuntimeError("redis-server did not start")
    yield
    if Broken.place == "store's end":
        raise OSError("it is not empty")


@pytest.mark.parametrize(
    ("place", "failed"),
    [
        ("", ["alone", "killed"]),
        ("made", ["start"]),
        ("start", ["start"]),
        ("store", ["start"]),
        ("stop", ["alone", "killed", "stop"]),
        ("close", ["alone", "killed", "left"]),
        ("left", ["alone", "killed", "left"]),
        ("last words", ["alone", "killed", "left"]),
        ("store's end", ["alone", "killed", "left"]),
    ],
)
def test_whatever_goes_wrong_the_end_says_what_was_found(
    place: str,
    failed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Broken, "place", place)
    monkeypatch.setattr(cluster_on_card, "Clusters", Broken)
    monkeypatch.setattr(cluster_on_card, "redis_server", no_store)
    out = tmp_path / "found.json"
    code = cluster_on_card.main(["alone", "killed", "--backend", "none", "--out", str(out)])
    assert code == len(failed)
    *_, found, last = capsys.readouterr().out.splitlines()
    assert json.loads(found)["backend"] == "none"
    names = f": {', '.join(failed)}" if failed else ""
    assert last.endswith(f" passed, {len(failed)} failed{names}")
    assert json.loads(out.read_text())["failed"] == failed


def test_a_driver_that_hangs_before_the_first_phase_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(*_: Any, **__: Any) -> NoReturn:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", hangs)
    monkeypatch.setattr(Broken, "place", "start")
    monkeypatch.setattr(cluster_on_card, "Clusters", Broken)
    monkeypatch.setattr(cluster_on_card, "redis_server", no_store)
    assert cluster_on_card.main(["alone"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed: start"
