"""Single draws, as arrays of one row; and what they must be, by sorting and adding all tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import numpy as np

from common.request import GREEDY_BELOW, SamplingParams, TokenLogprobs
from engine.core.runner_contract import SampleInput
from engine.core.sequences.seats import Seats
from engine.core.sequences.stop_rules import withheld_token_ids
from engine.runner.drawing.sampler import SampledRows, Sampler, token_logprobs
from engine.runner.kernels.sampling.draw import gumbel_noise
from engine.runner.kernels.sampling.filters import kept_prefix
from engine.runner.kernels.sampling.philox import philox_blocks


def rows_of(
    inputs: Sequence[SampleInput], vocab_size: int, eos_token_ids: Set[int] = frozenset()
) -> SampledRows:
    """Rows that draw as these inputs say; their histories need not fit their output indices."""
    longest = max(len(one.prompt_token_ids) + len(one.output_token_ids) for one in inputs)
    seats = Seats(len(inputs), longest, 1)
    starts, withheld = [0], []
    num_prompts, num_tokens = [], []
    for row, one in enumerate(inputs):
        history = [*one.prompt_token_ids, *one.output_token_ids]
        seats.token_ids[row, : len(history)] = history
        seats.set_params(row, one.params)
        num_prompts.append(len(one.prompt_token_ids))
        num_tokens.append(len(history))
        ids = withheld_token_ids(one.params, one.output_index, eos_token_ids)
        withheld += [i for i in ids if 0 <= i < vocab_size]
        starts.append(len(withheld))
    return SampledRows(
        seats.sampling,
        np.array([one.output_index for one in inputs], np.int64),
        seats.token_ids,
        np.arange(len(inputs)),
        np.array(num_prompts, np.int64),
        np.array(num_tokens, np.int64),
        np.array(starts, np.int64),
        np.array(withheld, np.int64),
    )


def draw_all(
    sampler: Sampler,
    logits: np.ndarray,
    inputs: Sequence[SampleInput],
    eos_token_ids: Set[int] = frozenset(),
) -> list[int | None]:
    """The drawn token of each row; None where there is none."""
    drawn, is_good = sampler.draw(logits, rows_of(inputs, logits.shape[1], eos_token_ids))
    return [
        token_id if good else None
        for token_id, good in zip(drawn.tolist(), is_good.tolist(), strict=True)
    ]


def sample_one(
    logits: Sequence[float] | np.ndarray, one: SampleInput, eos_token_ids: Set[int] = frozenset()
) -> tuple[int | None, TokenLogprobs | None]:
    """The drawn token of one row, with log probabilities if asked for."""
    rows = np.array([logits], np.float32)
    (token_id,) = draw_all(Sampler(rows.shape[1]), rows, [one], eos_token_ids)
    if one.params.logprobs is None or token_id is None:
        return token_id, None
    return token_id, token_logprobs(rows[0], token_id, one.params.logprobs)


def expected_token(logits: np.ndarray, one: SampleInput, eos_token_ids: Set[int]) -> int | None:
    """The token that the rules of `sampler` give, one row at a time, without any shortcut."""
    row, params = logits.astype(np.float32), one.params
    _penalise(row, one)
    if not np.isfinite(row).all():
        return None
    ids = withheld_token_ids(params, one.output_index, eos_token_ids)
    row[[i for i in ids if 0 <= i < len(row)]] = -np.inf
    likeliest = int(row.argmax())
    if row[likeliest] == -np.inf:
        return None
    if params.temperature < GREEDY_BELOW:
        return likeliest
    depths = (row[likeliest] - row) / np.float32(params.temperature)
    kept = reference_kept(depths, params.top_k, params.top_p, params.min_p)
    noise = noise_of(len(row), params.seed, one.output_index)
    return max(kept, key=lambda v: (noise[v] - depths[v] if depths[v] < math.inf else -1e300, -v))


def _penalise(row: np.ndarray, one: SampleInput) -> None:
    params: SamplingParams = one.params
    for token_id in {*one.prompt_token_ids, *one.output_token_ids}:
        penalty = np.float32(params.repetition_penalty)
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id in set(one.output_token_ids):
        count = list(one.output_token_ids).count(token_id)
        row[token_id] -= np.float32(params.frequency_penalty * count + params.presence_penalty)


def reference_kept(depths: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that the filters keep, in the order of their ranks; sorting everything."""
    ranked = sorted(range(len(depths)), key=lambda v: (depths[v], v))
    if top_k > 0:
        ranked = ranked[:top_k]
    weights = {v: float(np.exp(-depths[v])) for v in ranked}
    if top_p < 1:
        wanted, reached, kept = top_p * math.fsum(weights.values()), 0.0, []
        for v in ranked:
            kept.append(v)
            reached += weights[v]
            if reached >= wanted:
                break
        ranked = kept
    if min_p > 0:
        ranked = [v for v in ranked if depths[v] <= -math.log(min_p)]
    return ranked


def kept(depths: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    weights = np.exp(-depths)
    last_depth, last_id = kept_prefix(
        depths, weights, float(weights.sum(dtype=np.float64)), top_k, top_p, min_p
    )
    ids = np.arange(len(depths))
    is_kept = (depths < last_depth) | ((depths == last_depth) & (ids <= last_id))
    return [int(v) for v in np.flatnonzero(is_kept)]


def noise_of(vocab_size: int, seed: int, output_index: int) -> np.ndarray:
    words = np.empty((4, -(-vocab_size // 4)), np.uint32)
    philox_blocks(words, np.uint32(0), np.uint32(output_index), np.uint64(seed))
    in_order = words.T.reshape(-1)[:vocab_size]
    return np.array([gumbel_noise(word) for word in in_order])
