"""The words and the hashes of a prompt are those of its tokens, made once for all who ask."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from common.ids import AttemptId
from common.kv.blocks import hash_full_blocks, root_hash
from common.kv.prompt_blocks import PromptBlocks
from common.request import GenerationRequest, SamplingParams

TOKENS = (7,) * 20 + (9,) * 13


def test_words_are_the_tokens_made_once() -> None:
    blocks = PromptBlocks(TOKENS)
    assert blocks.words == array("I", TOKENS)
    assert blocks.words is blocks.words
    words = array("I", TOKENS)
    assert PromptBlocks(TOKENS, words).words is words


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("salt", ["", "mine"])
def test_hashes_are_those_of_its_full_blocks_and_made_once(size: int, salt: str) -> None:
    blocks, root = PromptBlocks(TOKENS), root_hash("model", salt)
    wanted = hash_full_blocks(TOKENS, size, "model", salt)
    found = blocks.hashes_behind(root, size, len(TOKENS))
    assert found == wanted
    assert blocks.hashes_behind(root, size, 1) is found


def test_no_more_is_hashed_than_is_asked_for_and_the_rest_later() -> None:
    blocks, root = PromptBlocks(TOKENS), root_hash("model", "")
    wanted = hash_full_blocks(TOKENS, 4, "model")
    assert blocks.hashes_behind(root, 4, 3) == wanted[:3]
    assert blocks.hashes_behind(root, 4, 5) == wanted[:5]
    assert blocks.hashes_behind(root, 4, 99) == wanted


def test_requests_share_what_is_known_of_their_prompt_and_of_no_other() -> None:
    blocks = PromptBlocks(TOKENS)
    request = GenerationRequest(
        id=AttemptId("r", 1),
        prompt_token_ids=blocks.token_ids,
        sampling=SamplingParams(max_tokens=1),
        deadline_s=1.0,
        known_blocks=blocks,
    )
    assert request.prompt_blocks is blocks
    assert replace(request, deadline_s=2.0).prompt_blocks is blocks
    other = replace(request, prompt_token_ids=(1, 2, 3))
    assert other.prompt_blocks.words == array("I", (1, 2, 3))
    assert other.prompt_blocks is other.prompt_blocks
