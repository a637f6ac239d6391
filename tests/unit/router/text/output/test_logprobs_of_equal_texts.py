"""Likeliest tokens of a completion are by their text, which two tokens may share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.request import TokenLogprobs
from router.api.answers.json_parts import completion_logprobs_json
from router.text.output.choice_text import LogprobEntry
from router.text.output.logprobs_json import DescribeToken, token_text
from router.text.text_model import TextModel
from tests.support.models.odd_models import sentencepiece
from tests.support.models.tiny_model import make_tiny_model

BYTES = {1: b"A", 2: b"A", 3: b"B", 4: b"", 5: b"", 6: b"\xe2", 7: b"\xe2"}


def describe(token_id: int) -> Any:
    return token_text(BYTES[token_id])


def tops(drawn: int, found: TokenLogprobs, how: DescribeToken = describe) -> Any:
    entry = LogprobEntry(drawn, found, 0)
    made = json.loads("".join(completion_logprobs_json([[entry]], how)))
    assert made["token_logprobs"] == [found.logprob]
    (top,) = made["top_logprobs"]
    return top


@pytest.mark.covers("T35")
@pytest.mark.parametrize(
    ("drawn", "logprob", "top", "shown"),
    [
        (1, -0.1, ((1, -0.1), (3, -2.0), (2, -9.0)), {"A": -0.1, "B": -2.0}),
        (2, -9.0, ((1, -0.1), (3, -2.0), (2, -9.0)), {"A": -0.1, "B": -2.0}),
        (2, -9.0, ((1, -0.1), (3, -2.0)), {"A": -0.1, "B": -2.0}),
        (3, -0.5, ((3, -0.5), (4, -9999.0), (5, float("-inf"))), {"B": -0.5, "": -9999.0}),
        (6, -0.5, ((6, -0.5), (7, -3.0)), {r"bytes:\xe2": -0.5}),
    ],
)
def test_of_tokens_with_one_text_the_likeliest_is_shown(
    drawn: int, logprob: float, top: tuple[tuple[int, float], ...], shown: dict[str, float]
) -> None:
    assert tops(drawn, TokenLogprobs(logprob, top)) == shown


@pytest.mark.covers("T35")
def test_a_byte_and_a_letter_of_a_tokenizer_with_both(tmp_path: Any) -> None:
    folder = make_tiny_model(tmp_path / "model")
    sentencepiece(folder)
    path = folder / "tokenizer.json"
    layout = json.loads(path.read_text())
    letter, other = layout["model"]["vocab"]["A"], layout["model"]["vocab"]["B"]
    layout["model"]["vocab"]["<0x41>"] = layout["model"]["vocab"].pop("B")
    path.write_text(json.dumps(layout))
    model = TextModel.load(folder, "tiny", 0)
    found = TokenLogprobs(-0.25, ((letter, -0.25), (other, -7.0)))
    assert tops(letter, found, model.describe_token) == {"A": -0.25}
