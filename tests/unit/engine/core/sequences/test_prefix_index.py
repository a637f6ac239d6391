"""A sequence's blocks in the prefix cache: which are found, and which are published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.kv.prompt_blocks import PromptBlocks
from engine.core.blocks.block_pool import BlockPool, BlockUse
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import Sequence
from tests.support.engine.build import BLOCK_SIZE, Engine, make_request, take_seat

A, B, C, D = (tuple(range(first, first + BLOCK_SIZE)) for first in (10, 20, 30, 40))


def index_of(pool: BlockPool, fingerprint: str = "model") -> PrefixIndex:
    return PrefixIndex(pool, block_size=BLOCK_SIZE, fingerprint=fingerprint, is_enabled=True)


def sequence_of(*blocks: tuple[int, ...], output: tuple[int, ...] = ()) -> Sequence:
    prompt = tuple(token for block in blocks for token in block)
    return Sequence(1, make_request(prompt, output_token_ids=output))


def publish(pool: BlockPool, index: PrefixIndex, *blocks: tuple[int, ...]) -> list[int]:
    """Compute all of these blocks; return their ids."""
    sequence = sequence_of(*blocks)
    take_seat(sequence, pool.allocate(len(blocks), BlockUse.RUNNING), sequence.num_known)
    index.publish(sequence)
    assert sequence.num_hashed_blocks == len(blocks)
    return sequence.block_table


def test_a_block_is_found_behind_the_blocks_it_was_computed_behind() -> None:
    pool = BlockPool(8)
    index = index_of(pool)
    first = publish(pool, index, A, B)
    second = publish(pool, index, C, D)
    assert index.match(sequence_of(A, B, (1,))) == first
    assert index.match(sequence_of(C, D, (1,))) == second
    assert index.match(sequence_of(A, D, (1,))) == first[:1]
    assert index.match(sequence_of(D, (1,))) == []


@pytest.mark.covers("T25")
def test_a_prompt_whose_logprobs_are_wanted_finds_nothing_until_its_output_begins() -> None:
    pool = BlockPool(4)
    index = index_of(pool)
    blocks = publish(pool, index, A, B)
    request = make_request((*A, *B, 1), prompt_logprobs=0)
    sequence = Sequence(1, request)
    assert index.match(sequence) == []
    assert index.match(Sequence(1, replace(request, output_token_ids=(2,)))) == blocks
    assert index.match(Sequence(2, request, has_remote_kv=True)) == blocks


def test_the_block_of_the_last_known_token_is_not_found() -> None:
    pool = BlockPool(2)
    index = index_of(pool)
    blocks = publish(pool, index, A, B)
    assert index.match(sequence_of(A, B)) == blocks[:1]
    assert index.match(sequence_of(A, B, output=(1,))) == blocks
    hashed = sequence_of(A, B)
    take_seat(hashed, blocks, hashed.num_known)
    index.publish(hashed)
    assert index.match(hashed) == blocks[:1], "its own hashes are known"


def test_kv_of_another_model_or_layout_is_not_found() -> None:
    pool = BlockPool(2)
    publish(pool, index_of(pool, "model"), A, B)
    assert index_of(pool, "other").match(sequence_of(A, B, (1,))) == []


def test_an_engine_answers_alike_behind_blocks_with_the_same_tokens() -> None:
    """The prompts share their second block's tokens, and not its KV."""
    engine = Engine(num_blocks=30)
    for prompt in ((*A, *B, 1), (*C, *D, 1), (*A, *D, 1)):
        sequence = engine.add(make_request(prompt, max_tokens=6))
        engine.run()
        alone = Engine(num_blocks=30, caching=False)
        plain = alone.add(make_request(prompt, max_tokens=6))
        alone.run()
        found = engine.outputs[sequence.sequence_id]
        assert found == alone.outputs[plain.sequence_id]


def test_kv_of_another_salt_is_not_found() -> None:
    pool = BlockPool(8)
    index = index_of(pool)
    plain = publish(pool, index, A, B)
    mine = Sequence(2, make_request((*A, *B, 1), cache_salt="mine"))
    assert index.match(mine) == []
    take_seat(mine, pool.allocate(3, BlockUse.RUNNING), 2 * BLOCK_SIZE)
    index.publish(mine)
    assert (
        index.match(Sequence(3, make_request((*A, *B, 2), cache_salt="mine")))
        == (mine.block_table[:2])
    )
    assert index.match(Sequence(4, make_request((*A, *B, 2), cache_salt="yours"))) == []
    assert index.match(sequence_of(A, B, (1,))) == plain


def test_hashes_that_another_node_has_made_of_a_prompt_are_those_that_are_found() -> None:
    prompt, answer = (A[0],) * (2 * BLOCK_SIZE + 3), tuple(range(50, 50 + 2 * BLOCK_SIZE))
    shared = PromptBlocks(prompt)
    found = []
    for known in (None, shared, shared):
        request = make_request(prompt, output_token_ids=answer, max_tokens=99)
        sequence = Sequence(1, replace(request, known_blocks=known))
        found.append(list(index_of(BlockPool(1)).hashes_behind(sequence, 0)))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4
