"""The prompts that an MTP layer is distilled from."""

from __future__ import annotations

import re

from bench.speculation.prompts import PROMPTS
from tools.mtp_training.everyday_messages import GAPS, MESSAGES
from tools.mtp_training.prompt_bank import bank


def texts(seed: int = 0) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in bank(seed)]


def test_a_seed_gives_the_same_prompts_and_a_key_is_one_text() -> None:
    assert bank(3) == bank(3)
    assert texts(3) != texts(4)
    keys = {prompt.key: prompt.messages[0]["content"] for prompt in bank(3) + bank(4)}
    assert len(keys) == len(set(texts(3) + texts(4)))


def test_every_gap_is_filled_and_every_message_is_used() -> None:
    given = texts()
    assert not any("{" in text for text in given)
    assert {kind.split("_")[0] for m in MESSAGES for kind in re.findall(r"{(\w+)}", m)} == set(GAPS)
    for message in MESSAGES:
        parts = [re.escape(part) for part in re.split(r"{\w+}", message)]
        pattern = re.compile(".+".join(parts), re.IGNORECASE)
        assert any(pattern.fullmatch(text) for text in given)


def test_two_gaps_of_one_kind_are_filled_differently() -> None:
    pattern = re.compile(r"Which is harder to learn, (.+) or (.+)\?")
    found = [match for text in texts() if (match := pattern.fullmatch(text))]
    assert len(found) >= 4
    assert all(one[1] != one[2] for one in found)


def test_nothing_that_speculation_is_measured_on_is_trained_on() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 7]) for i in range(len(words) - 6)}

    measured = set().union(*(runs(prompt) for prompts in PROMPTS.values() for prompt in prompts))
    assert measured.isdisjoint(set().union(*map(runs, texts())))
