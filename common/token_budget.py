"""How many tokens a step can hold. Scheduling, buffers, KV memory and validation all use this."""

from __future__ import annotations

from common.blocks import blocks_for
from common.errors import ConfigError
from common.nodes import Role

DEFAULT_NUM_SPECULATIVE_TOKENS = {"none": 0, "ngram": 8, "suffix": 8, "mtp": 5}
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
    recomputes_locally: bool = True,
) -> int:
    """Return the maximum number of tokens of one forward pass.

    A decode node that never computes prompts runs one token and its drafts per sequence. One that
    computes prompts, after a preemption or short ones, can fill the whole budget.
    """
    if role is Role.DECODE:
        decodes = max_num_seqs * tokens_per_seq
        return max(decodes, max_num_batched_tokens) if recomputes_locally else decodes
    return max_num_batched_tokens


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
        f"but the KV cache has {num_blocks}; wanted {shorter}kv_cache_memory for {needed} blocks"
    )
