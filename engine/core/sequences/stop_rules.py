"""Decide by tokens when an output is complete (stop strings are text and belong to the router)."""

from __future__ import annotations

from collections.abc import Sequence, Set

from common.request import FinishReason, SamplingParams


def end_tokens(sampling: SamplingParams, eos_token_ids: Set[int]) -> Set[int]:
    """Return the tokens that end an output: the model's own ones and the request's."""
    if sampling.ignore_eos:
        return frozenset(sampling.stop_token_ids)
    if not sampling.stop_token_ids:
        return eos_token_ids  # one set for most sequences
    return eos_token_ids | frozenset(sampling.stop_token_ids)


def withheld_token_ids(
    sampling: SamplingParams, output_index: int, eos_token_ids: Set[int]
) -> Sequence[int]:
    """Return the token ids that must not be drawn as token `output_index` of the output.

    Before `min_tokens` these are all stop and end-of-sequence tokens, the latter even with
    `ignore_eos` (as in vLLM). A grammar decides itself, since it may allow nothing but the end.
    """
    if output_index >= sampling.min_tokens or sampling.grammar is not None:
        return ()
    return (*sampling.stop_token_ids, *eos_token_ids)


def until_end(
    drawn: tuple[int, ...],
    *,
    num_prompt: int,
    num_known: int,
    max_tokens: int,
    end_token_ids: Set[int],
    max_model_len: int,
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Return `drawn` up to the token that ends the output, and the reason; else all and None.

    `num_known` tokens, `num_prompt` of them the prompt's, come before `drawn`. A stop token is part
    of the output that nodes report; the router decides whether to show it.
    """
    most = max(1, min(max_tokens + num_prompt, max_model_len) - num_known)
    kept = drawn[:most]
    if not end_token_ids.isdisjoint(kept):
        count = next(n for n, token_id in enumerate(kept, 1) if token_id in end_token_ids)
        return kept[:count], FinishReason.STOP
    return kept, FinishReason.LENGTH if len(kept) == most else None
