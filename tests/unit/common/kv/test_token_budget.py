"""Tokens per sequence, the largest step, and the longest sequence that a pool holds."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.kv.token_budget import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    fit_max_model_len,
    get_max_chunk_tokens,
    num_speculative_tokens,
    tokens_per_seq,
)
from common.nodes import Role

METHODS = tuple(DEFAULT_NUM_SPECULATIVE_TOKENS)


@pytest.mark.covers("B05", "B06", "S03")
@pytest.mark.parametrize("configured", [0, 1, 4, 64])
def test_without_a_method_speculation_is_off(configured: int) -> None:
    # The drafts that are configured beside it are not read.
    assert num_speculative_tokens("none", configured) == 0
    assert tokens_per_seq("none", configured) == 1


@pytest.mark.covers("F100", "S03")
@pytest.mark.parametrize("method", METHODS[1:])
def test_with_any_method_drafts_count(method: str) -> None:
    assert [tokens_per_seq(method, k) for k in (1, 4, 64)] == [2, 5, 65]
    assert tokens_per_seq(method, 0) > 1


def test_the_defaults_of_the_methods() -> None:
    assert [tokens_per_seq(method, 0) for method in METHODS] == [1, 9, 9, 6, 9]


def largest_step(role: Role, seats: int, method: str, configured: int) -> int:
    return get_max_chunk_tokens(
        role,
        max_num_seqs=seats,
        max_num_batched_tokens=8192,
        tokens_per_seq=tokens_per_seq(method, configured),
        has_local_prefill=False,
    )


@pytest.mark.covers("B18", "B19", "E19", "E20", "E21", "F107", "S09")
@pytest.mark.parametrize(
    ("seats", "method", "configured", "expected"),
    [
        pytest.param(256, "mtp", 1, 512, id="E19"),
        pytest.param(100, "mtp", 3, 400, id="E20"),
        pytest.param(256, "none", 1, 256, id="E21"),
        # B18, B19: the rule is the same for every method, and needs no device to be tested.
        pytest.param(256, "ngram", 1, 512, id="ngram"),
        pytest.param(256, "suffix", 1, 512, id="suffix"),
    ],
)
def test_the_largest_step_of_a_decode_node(
    seats: int, method: str, configured: int, expected: int
) -> None:
    assert largest_step(Role.DECODE, seats, method, configured) == expected


@pytest.mark.covers("S09", "S53")
@pytest.mark.parametrize(
    ("granularity", "expected"), [(1, 400), (4, 400), (8, 404), (64, 460), (512, 908)]
)
def test_a_decode_node_without_local_prefill_has_room_for_a_chunk(
    granularity: int, expected: int
) -> None:
    found = get_max_chunk_tokens(
        Role.DECODE,
        max_num_seqs=100,
        max_num_batched_tokens=8192,
        tokens_per_seq=4,
        chunk_granularity=granularity,
        has_local_prefill=False,
    )
    assert found == expected


@pytest.mark.covers("B19", "E22", "S10")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED], ids=["E22 prefill", "E22 mixed"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("configured", [1, 4])
def test_where_prompts_are_computed_the_budget_is_the_largest_step(
    role: Role, method: str, configured: int
) -> None:
    assert largest_step(role, 256, method, configured) == 8192


@pytest.mark.covers("E24", "S09")
def test_a_decode_node_that_computes_prompts_may_fill_its_budget() -> None:
    def most(cap: int) -> int:
        return get_max_chunk_tokens(
            Role.DECODE, max_num_seqs=256, max_num_batched_tokens=cap, tokens_per_seq=2
        )

    assert most(8192) == 8192
    assert most(512) == 512


@pytest.mark.covers("C23", "E23")
def test_the_models_length_does_not_bound_a_step_of_many_sequences() -> None:
    assert min(8192 + 1000, 4096) < 8192
    assert largest_step(Role.MIXED, 8, "none", 0) == 8192


def fit(configured: int, *, num_blocks: int = 128, per_seq: int = 1, limit: int = 100_000) -> int:
    return fit_max_model_len(
        configured=configured,
        model_limit=limit,
        num_blocks=num_blocks,
        block_size=64,
        tokens_per_seq=per_seq,
    )


@pytest.mark.covers("S54")
def test_the_longest_sequence_leaves_room_for_a_step() -> None:
    assert fit(0) == 127 * 64
    assert fit(0, per_seq=64) == 127 * 64
    assert fit(0, per_seq=65) == 126 * 64
    assert fit(0, limit=4096) == 4096
    assert fit(127 * 64) == 127 * 64
    assert fit(100) == 100


@pytest.mark.covers("S54")
def test_what_does_not_fit_names_every_number() -> None:
    with pytest.raises(ConfigError) as caught:
        fit(8192, per_seq=5)
    assert str(caught.value) == (
        "max_model_len is 8192: 8192 tokens take 128 blocks of block_size = 64, and one more step "
        "of 5 tokens 1, but the KV cache has 128; wanted a max_model_len of at most 8128, or "
        "memory_fraction or kv_cache_memory for 129 blocks"
    )
    with pytest.raises(ConfigError, match="kv_cache_memory for 3 blocks"):
        fit(0, num_blocks=1, per_seq=65)
    with pytest.raises(ConfigError) as caught:
        fit(0, num_blocks=1)
    assert str(caught.value) == (
        "max_model_len is 0: 1 tokens take 1 blocks of block_size = 64, and one more step of 1 "
        "tokens 1, but the KV cache has 1; wanted memory_fraction or kv_cache_memory for 2 blocks"
    )
