"""When an output is complete, by tokens alone (stop strings are text and belong to the router)."""

from __future__ import annotations

from collections.abc import Set

from common.request import FinishReason, SamplingParams


def finish_reason_after(
    token_id: int,
    *,
    num_output: int,
    num_known: int,
    sampling: SamplingParams,
    eos_token_ids: Set[int],
    max_model_len: int,
) -> FinishReason | None:
    """Whether the output ends with `token_id`, its `num_output`-th token; the first one included.

    A stop token is part of the output that nodes report; showing it or not is the router's choice.
    """
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return FinishReason.STOP
    if num_output >= sampling.max_tokens or num_known >= max_model_len:
        return FinishReason.LENGTH
    return None
