"""From logits to tokens: penalties, filters, the draw and log probabilities.

In this order, with the source of each rule:

1. Log probabilities: log-softmax of the model's own logits, before anything below.
2. Repetition penalty r over prompt and output tokens, once per distinct token: logit / r where it
   is positive, logit * r elsewhere (CTRL, Keskar et al. 2019; transformers, vLLM).
3. Frequency and presence penalty over output tokens: logit - frequency * count - presence * (count
   > 0) (the OpenAI API's definition).
4. `min_tokens`: before so many output tokens, stop and end-of-sequence tokens have no logit (vLLM).
5. Temperature. 0, and anything below `GREEDY_BELOW`, is greedy: the largest logit.
6. top-k: the k likeliest, exactly; top-p (Holtzman et al. 2019): of those the smallest set that
   holds at least p of their probability, at least one; min-p (Nguyen et al. 2024): of those the
   ones at least min_p as likely as the likeliest.
7. The draw, by Gumbel-max with counter-based noise of (seed, output index, token) alone.

Ties go to the lowest token id everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import numpy as np

from common.errors import InternalError
from common.request import TokenLogprobs
from engine.core.plan import SampleInput
from engine.core.stop_rules import withheld_token_ids
from engine.runner.sample_kernels import draw, kept_prefix, likeliest

# Below this the division would leave float32's range. The largest logit would be drawn anyway
# unless another one is within 1e-4 of it.
GREEDY_BELOW = 1e-5


Sampled = tuple[int, TokenLogprobs | None]
"""A drawn token, with log probabilities if its request asked for them."""


class BadLogits(InternalError):
    """No token can be drawn from a row of logits: NaN, infinities, or every token withheld."""


class Sampler:
    """Draws tokens. It keeps no state: a result is a function of a row and its input.

    Any thread may use it.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Set[int] = frozenset()) -> None:
        """Draw from `vocab_size` tokens; `eos_token_ids` end an output, see `min_tokens`."""
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: np.ndarray, one: SampleInput) -> Sampled:
        """Draw the token of one row.

        `logits` is `[vocab_size]`, float32, contiguous and writable; its contents are destroyed.
        Raises `BadLogits`, an `InternalError`, when it holds NaN or infinities or no token may be
        drawn, and `InternalError` when shape, type or token ids do not fit.
        """
        wanted = (self.vocab_size,)
        if logits.shape != wanted or logits.dtype != np.float32 or not logits.flags.carray:
            raise InternalError(
                f"logits are {logits.dtype} {logits.shape}: wanted writable, C-contiguous float32 "
                f"{wanted}"
            )
        withheld = withheld_token_ids(one.params, one.output_index, self._eos_token_ids)
        token = _sample_row(logits, one, withheld)
        if token is None:
            raise BadLogits(
                "the logits hold NaN or infinite values, or every token is withheld: wanted finite "
                "numbers"
            )
        return token


def _sample_row(
    row: np.ndarray, one: SampleInput, withheld_token_ids: Sequence[int]
) -> Sampled | None:
    """Return the token of one row, or None if none can be drawn. Overwrites `row`."""
    params = one.params
    raw = row if params.logprobs is None else row.copy()
    if params.has_penalties:
        penalise(row, one)
    if not np.isfinite(row).all():
        return None
    if withheld_token_ids:
        # An id outside the vocabulary, of a client or a checkpoint, is never drawn anyway.
        row[[one_id for one_id in withheld_token_ids if 0 <= one_id < len(row)]] = -np.inf
    token_id = int(row.argmax())
    if row[token_id] == -np.inf:
        return None
    if params.temperature >= GREEDY_BELOW:
        token_id = _drawn(row, row[token_id], one)
    if params.logprobs is None:
        return token_id, None
    return token_id, _logprobs(raw, token_id, params.logprobs)


def penalise(row: np.ndarray, one: SampleInput) -> None:
    """Change the logits of tokens in the prompt or the output, see rules 2 and 3."""
    params = one.params
    prompt_ids = _token_ids(one.prompt_token_ids, len(row))
    output_ids = _token_ids(one.output_token_ids, len(row))
    if params.repetition_penalty != 1.0:
        is_seen = np.zeros(len(row), np.bool_)
        is_seen[prompt_ids] = True
        is_seen[output_ids] = True
        penalty = np.float32(params.repetition_penalty)
        row[is_seen] = np.where(row[is_seen] > 0, row[is_seen] / penalty, row[is_seen] * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        distinct_ids, counts = np.unique(output_ids, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        row[distinct_ids] -= penalties.astype(np.float32)


def _token_ids(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise InternalError(
            f"token ids {ids.min()} to {ids.max()}: wanted 0 to {vocab_size - 1}, the vocabulary"
        )
    return ids


def _drawn(row: np.ndarray, largest: np.float32, one: SampleInput) -> int:
    """Return the drawn token. Turns `row` into depths (see sample_kernels)."""
    params = one.params
    with np.errstate(over="ignore"):  # an infinite depth is valid
        np.subtract(largest, row, out=row)
        np.divide(row, np.float32(params.temperature), out=row)
    weights = np.exp(-row) if params.top_p < 1.0 else row
    last_depth, last_id = kept_prefix(row, weights, params.top_k, params.top_p, params.min_p)
    return int(draw(row, last_depth, last_id, np.uint64(params.seed), np.uint32(one.output_index)))


def _logprobs(raw: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-softmax of the model's logits at the drawn token and at the likeliest ones."""
    largest = raw.max()
    log_sum = float(largest) + math.log(np.exp(raw - largest).sum(dtype=np.float64))
    top = likeliest(raw, min(num_top, len(raw)))
    return TokenLogprobs(
        float(raw[token_id]) - log_sum,
        tuple((int(one), float(raw[one]) - log_sum) for one in top),
    )
