"""Draw a row's token from its *head*: a few tokens that a device found, with their logits.

The head holds every token that can be drawn, or it is seen here that it may not, and the whole row
is needed. So a token drawn from a head is the one that `sampler` draws from the row, bit for bit:
what the device computes only chooses candidates, with a margin for its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numba
import numpy as np
from numba import uint32

from common.request import GREEDY_BELOW
from engine.core.runner_contract import SampleInput
from engine.runner.kernels.sampling.draw import gumbel_noise
from engine.runner.kernels.sampling.filters import kept_prefix
from engine.runner.kernels.sampling.philox import philox_blocks

_MARGIN = 1e-5
"""How much of a value a device's rounding may change; ten times what float32 explains."""


@dataclass(frozen=True, slots=True)
class Head:
    """The likeliest tokens of a row, in order of their ids, with the model's own logits.

    `is_whole`: it is the whole vocabulary. `total` is the weight of all tokens of the row, relative
    to the likeliest. `noisy_ids` are the tokens with the largest noise - depth, and `noisy_logits`
    theirs; empty if the device did not look for them.
    """

    ids: np.ndarray
    logits: np.ndarray
    is_whole: bool
    total: float
    noisy_ids: np.ndarray
    noisy_logits: np.ndarray


def is_unfiltered(one: SampleInput, vocab_size: int) -> bool:
    """Return whether every token can be drawn."""
    params = one.params
    is_drawn = params.temperature >= GREEDY_BELOW
    has_top_k = 0 < params.top_k < vocab_size
    return is_drawn and not has_top_k and params.top_p >= 1.0 and params.min_p <= 0.0


def draw_from_head(
    head: Head, one: SampleInput, withheld: Sequence[int], vocab_size: int
) -> int | None:
    """Return the token, or None if the whole row is needed."""
    logits = _changed(head.ids, head.logits, one, withheld)
    largest = logits.max()
    is_clear = head.is_whole or logits.min() < largest - _MARGIN * abs(largest) - _MARGIN
    if not np.isfinite(largest) or not is_clear:
        return None
    if one.params.temperature < GREEDY_BELOW:
        return int(head.ids[logits.argmax()])
    if is_unfiltered(one, vocab_size):
        return _draw_unfiltered(head, one, withheld, largest)
    depths = _depths(logits, largest, one)
    kept = _kept(head, depths, one, vocab_size)
    if kept is None:
        return None
    return _best(head.ids[kept], depths[kept], one)[0]


def _draw_unfiltered(
    head: Head, one: SampleInput, withheld: Sequence[int], largest: np.float32
) -> int | None:
    logits = _changed(head.noisy_ids, head.noisy_logits, one, withheld)
    token_id, best, worst = _best(head.noisy_ids, _depths(logits, largest, one), one)
    is_clear = head.is_whole or worst < best - _MARGIN * abs(best) - _MARGIN
    return token_id if is_clear else None


def _changed(
    ids: np.ndarray, logits: np.ndarray, one: SampleInput, withheld: Sequence[int]
) -> np.ndarray:
    """Return these tokens' logits after penalties, with withheld ones lowest."""
    changed = logits.copy()
    if one.params.has_penalties:
        places = replace(
            one,
            prompt_token_ids=_places(ids, one.prompt_token_ids).tolist(),
            output_token_ids=_places(ids, one.output_token_ids).tolist(),
        )
        _penalise(changed, places)
    changed[_places(ids, withheld)] = -np.inf
    return changed


def _penalise(values: np.ndarray, one: SampleInput) -> None:
    """Apply penalties to `values`; the tokens of `one` are places in it."""
    params = one.params
    output = np.asarray(one.output_token_ids, np.int64)
    if params.repetition_penalty != 1.0:
        is_seen = np.zeros(len(values), np.bool_)
        is_seen[np.asarray(one.prompt_token_ids, np.int64)] = True
        is_seen[output] = True
        penalty = np.float32(params.repetition_penalty)
        seen = values[is_seen]
        values[is_seen] = np.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        distinct, counts = np.unique(output, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        values[distinct] -= penalties.astype(np.float32)


def _places(ids: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """Return where tokens are in the sorted `ids`; those that are not there are left out."""
    wanted = np.asarray(token_ids, np.int64)
    places = np.searchsorted(ids, wanted)
    is_there = places < len(ids)
    is_there[is_there] = ids[places[is_there]] == wanted[is_there]
    return np.asarray(places[is_there])


def _depths(logits: np.ndarray, largest: np.float32, one: SampleInput) -> np.ndarray:
    with np.errstate(over="ignore"):  # an infinite depth is valid
        return np.asarray((largest - logits) / np.float32(one.params.temperature))


def _kept(head: Head, depths: np.ndarray, one: SampleInput, vocab_size: int) -> np.ndarray | None:
    """Return which tokens the filters keep, or None if the head may lack one of them."""
    params = one.params
    has_top_k = 0 < params.top_k < vocab_size
    if has_top_k and params.top_k > len(depths):
        return None
    weights = np.exp(-depths)
    if has_top_k or head.is_whole or params.top_p >= 1.0:
        end = kept_prefix(depths, weights, -1.0, params.top_k, params.top_p, params.min_p)
    else:
        found = _top_p(depths, weights, params.top_p * head.total)
        if found is None:
            return None
        end = found
        deepest = -math.log(params.min_p) if params.min_p > 0.0 else np.inf
        if end[0] > deepest:
            end = deepest, len(depths)
    # No token outside the head is as likely as the head's last one, but for rounding.
    last_depth = (
        kept_prefix(depths, weights, -1.0, params.top_k, 1.0, 0.0)[0] if has_top_k else end[0]
    )
    edge = float(depths.max())
    if not head.is_whole and not last_depth < edge - _MARGIN * edge - _MARGIN:
        return None
    is_before = depths < end[0]
    return is_before | ((depths == end[0]) & (np.arange(len(depths)) <= end[1]))


def _top_p(depths: np.ndarray, weights: np.ndarray, wanted: float) -> tuple[float, int] | None:
    """Return the end of the smallest prefix of weight `wanted`; None if rounding may decide."""
    order = np.lexsort((np.arange(len(depths)), depths))
    reached = np.cumsum(weights[order], dtype=np.float64)
    place = int(np.searchsorted(reached, wanted))
    if place == len(reached):
        return None
    before = reached[place - 1] if place else 0.0
    if min(reached[place] - wanted, wanted - before) < _MARGIN * wanted:
        return None
    return float(depths[order[place]]), int(order[place])


def _best(ids: np.ndarray, depths: np.ndarray, one: SampleInput) -> tuple[int, float, float]:
    """Return the token with the largest noise - depth, its score and the lowest score."""
    seed, index = np.uint64(one.params.seed), np.uint32(one.output_index)
    scores = _scores(ids, depths, seed, index)
    best = int(scores.argmax())  # the first, so the lowest id, among equals
    return int(ids[best]), float(scores[best]), float(scores.min())


@numba.njit("float64[::1](int64[::1], float32[::1], uint64, uint32)", nogil=True, cache=True)
def _scores(ids: np.ndarray, depths: np.ndarray, seed: int, output_index: int) -> np.ndarray:
    """Return noise - depth of each token; see `kernels.draw`."""
    words = np.empty((4, 1), np.uint32)
    scores = np.empty(len(ids), np.float64)
    for at in range(len(ids)):
        philox_blocks(words, uint32(ids[at] >> 2), output_index, seed)
        scores[at] = gumbel_noise(words[ids[at] & 3, 0]) - depths[at]
    return scores
