"""How many tokens a step can hold. Scheduling, buffers, KV memory and validation all use this."""

from __future__ import annotations

from common.errors import ConfigError
from common.kv.blocks import blocks_for
from common.nodes import Role

DEFAULT_NUM_SPECULATIVE_TOKENS = {"none": 0, "ngram": 8, "suffix": 8, "mtp": 5, "grammar": 8}
"""Drafts per sequence and step by method, unless the configuration sets a number."""


def num_speculative_tokens(method: str, configured: int) -> int:
    """Return the maximum number of drafts per sequence and step: 0 without a method."""
    if method == "none":
        return 0
    return configured or DEFAULT_NUM_SPECULATIVE_TOKENS[method]


def tokens_per_seq(method: str, configured: int) -> int:
    """Return the maximum number of tokens of a decoding sequence in a step: one and its drafts."""
    return 1 + num_speculative_tokens(method, configured)


def get_max_chunk_tokens(
    role: Role,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tokens_per_seq: int,
    chunk_granularity: int = 1,
    has_local_prefill: bool = True,
) -> int:
    """Return the maximum number of tokens of one forward pass.

    A decode node without local prefill runs one token and its drafts per sequence. What it must
    compute nevertheless, after a preemption or for a request that another node began, is divided
    into chunks that fit: beside all decodes but one there is room for `chunk_granularity` tokens.
    All other nodes can fill the whole budget.
    """
    if role is not Role.DECODE:
        return max_num_batched_tokens
    others = (max_num_seqs - 1) * tokens_per_seq
    decodes = others + max(tokens_per_seq, chunk_granularity)
    return max(decodes, max_num_batched_tokens) if has_local_prefill else decodes


def fit_max_model_len(
    *, configured: int, model_limit: int, num_blocks: int, block_size: int, tokens_per_seq: int
) -> int:
    """Return the longest prompt and output together, in tokens, that a pool of KV blocks can hold.

    The pool must hold the longest sequence and the slots of one more step of it. `configured` 0
    means the maximum that model and pool allow. Raises `ConfigError` when the pool is too small.
    """
    step_blocks = blocks_for(tokens_per_seq, block_size)
    most = max(num_blocks - step_blocks, 0) * block_size
    if not configured and most:
        return min(model_limit, most)
    if 0 < configured <= most:
        return configured
    length = configured or 1
    needed = blocks_for(length, block_size) + step_blocks
    shorter = f"a max_model_len of at most {most}, or " if most else ""
    raise ConfigError(
        f"max_model_len is {configured}: {length} tokens take {needed - step_blocks} blocks of "
        f"block_size = {block_size}, and one more step of {tokens_per_seq} tokens {step_blocks}, "
        f"but the KV cache has {num_blocks}; wanted {shorter}"
        f"memory_fraction or kv_cache_memory for {needed} blocks"
    )
