"""What is made once of a prompt in a process with several nodes is what each of them would make."""

from __future__ import annotations

from array import array

import pytest

from common.ids import AttemptId
from common.kv.blocks import hash_full_blocks, root_hash
from common.kv.shared_prompt import SharedPrompt
from common.request import GenerationRequest, SamplingParams

TOKENS = (7,) * 20 + (9,) * 13


def prompt() -> SharedPrompt:
    return SharedPrompt.of_runs((7, 9), 20, 33)


def test_it_is_the_tokens() -> None:
    assert prompt() == TOKENS
    assert prompt().words == array("I", TOKENS)


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("salt", ["", "mine"])
def test_hashes_are_those_of_its_full_blocks_and_made_once(size: int, salt: str) -> None:
    shared, root = prompt(), root_hash("model", salt)
    found = shared.hashes_behind(root, size)
    assert found == hash_full_blocks(TOKENS, size, "model", salt)
    assert shared.hashes_behind(root, size) is found


def test_requests_for_it_share_its_words() -> None:
    shared = prompt()
    asked = [
        GenerationRequest(
            id=AttemptId("r", n),
            prompt_token_ids=shared,
            sampling=SamplingParams(max_tokens=1),
            deadline_s=1.0,
        )
        for n in (1, 2)
    ]
    assert all(one.prompt_words is shared.words for one in asked)
