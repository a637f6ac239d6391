"""From logits to tokens: penalties, filters, the draw and log probabilities, all rows at once.

In this order, with the source of each rule:

0. Tokens that a grammar or the request's `allowed_token_ids` do not allow are taken out of the row
   (vLLM does so here too). Where a budget of thinking is spent its last tag alone is left, if a
   grammar takes it there.
1. Log probabilities: log-softmax of these logits, before anything below. Then biases are added to
   the logits of single tokens (the OpenAI API's definition), and the last token of a bad word is
   withheld behind the others (vLLM).
2. Repetition penalty r over prompt and output tokens, once per distinct token: logit / r where it
   is positive, logit * r elsewhere (CTRL, Keskar et al. 2019; transformers, vLLM).
3. Frequency and presence penalty over output tokens: logit - frequency * count - presence * (count
   > 0) (the OpenAI API's definition).
4. Before `min_tokens` output tokens, no token that ends the output (vLLM).
5. Temperature. 0, and anything below `common.request.GREEDY_BELOW`, is greedy: the largest logit.
6. top-k: the k likeliest, exactly; top-p (Holtzman et al. 2019): of those the smallest set that
   holds at least p of their probability, at least one; min-p (Nguyen et al. 2024): of those the
   ones at least min_p as likely as the likeliest.
7. The draw, by Gumbel-max with counter-based noise of (seed, output index, token) alone.

Ties go to the lowest token id everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numba import get_num_threads, set_num_threads

from common.errors import InternalError
from common.request import TokenLogprobs
from common.token_rules import TokenRules
from engine.core.sequences.seats import Seats
from engine.core.sequences.stop_rules import withheld_token_ids
from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.token_rules import AllowedMasks, Biases, banned_token_ids, biases_of
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.grammars.unmasked_rows import UnmaskedRows
from engine.runner.kernels.lock import KERNEL_LOCK
from engine.runner.kernels.sampling.filters import likeliest
from engine.runner.kernels.sampling.sample_rows import DRAWN, Scratch, sample_rows
from engine.runner.kernels.step_rows import lay_out_draws

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """How the token after each row is drawn, as arrays `[rows]`.

    `ways` has `SAMPLING_COLUMNS`. The tokens before the drawn one are the first `num_tokens` of row
    `histories` of `token_ids`; `num_prompts` of them are the prompt's. Row r must not draw
    `withheld_ids[withheld_starts[r]:withheld_starts[r + 1]]`. `allowed` says which tokens grammars
    and requests allow, `biases` what is added to their logits, `unmasked` which rows are drawn
    without a mask and then checked; None where no row has any.
    """

    ways: np.ndarray
    output_indices: np.ndarray
    token_ids: np.ndarray
    histories: np.ndarray
    num_prompts: np.ndarray
    num_tokens: np.ndarray
    withheld_starts: np.ndarray
    withheld_ids: np.ndarray
    allowed: AllowedTokens | None = None
    biases: Biases | None = None
    unmasked: UnmaskedRows | None = None

    def __len__(self) -> int:
        return len(self.ways)

    def take(self, rows: np.ndarray) -> SampledRows:
        """Return these rows."""
        starts, ends = self.withheld_starts[rows], self.withheld_starts[rows + 1]
        withheld = [self.withheld_ids[a:b] for a, b in zip(starts, ends, strict=True) if a < b]
        return SampledRows(
            self.ways[rows],
            self.output_indices[rows],
            self.token_ids,
            self.histories[rows],
            self.num_prompts[rows],
            self.num_tokens[rows],
            np.concatenate(([0], np.cumsum(ends - starts))),
            np.concatenate(withheld) if withheld else self.withheld_ids[:0],
            None if self.allowed is None else self.allowed.take(rows),
            None if self.biases is None else self.biases.take(rows),
            None if self.unmasked is None else self.unmasked.take(rows),
        )


def sampled_rows(
    batch: StepBatch,
    vocab_size: int,
    eos_token_ids: Set[int],
    allowed: AllowedTokens | None = None,
    masks: AllowedMasks | None = None,
    unmasked: UnmaskedRows | None = None,
) -> SampledRows:
    """Return the rows of a batch's draws, in the order of `FlatBatch.sampled_rows`.

    `allowed` are the masks of grammars, `masks` keeps those of requests; `unmasked` are the rows
    under grammars that have no mask yet.
    """
    seats = batch.seats
    histories, num_tokens = lay_out_draws(
        batch.rows, batch.num_drafts, batch.is_sampled, seats.num_known
    )
    num_prompts = seats.num_prompt.take(histories)
    output_indices = num_tokens - num_prompts
    ways = seats.sampling.take(histories)
    rows = SampledRows(
        ways,
        output_indices,
        seats.token_ids,
        histories,
        num_prompts,
        num_tokens,
        np.zeros(len(histories) + 1, np.int64),
        _NO_TOKENS,
        allowed,
        None,
        unmasked,
    )
    has_rules = seats.have_rules_at(histories, output_indices)
    is_ruled = (output_indices < ways["min_tokens"]) | has_rules
    if is_ruled.any():
        rules = [_rules(seats, row) for row in histories.tolist()] if has_rules.any() else []
        tags = _tags_behind_thinking(rows, seats, rules)
        is_ruled[list(tags)] = False
        withheld = _withheld(rows, seats, is_ruled.nonzero()[0], rules, vocab_size, eos_token_ids)
        only = [
            (tags[row],) if row in tags else one.allowed_token_ids for row, one in enumerate(rules)
        ]
        rows = replace(
            rows,
            withheld_starts=np.cumsum([0, *map(len, withheld)]),
            withheld_ids=np.array([one for ids in withheld for one in ids], np.int64),
            allowed=(masks or AllowedMasks(vocab_size)).add_to(allowed, only),
            biases=biases_of(rules, vocab_size),
        )
    return rows


def _tags_behind_thinking(
    rows: SampledRows, seats: Seats, rules: Sequence[TokenRules]
) -> dict[int, int]:
    """Return the token that ends the thinking, by row, where the budget for it is spent.

    A grammar that does not take it there, as within a character, puts it off.
    """
    tags = {}
    for row, budget in ((row, one.thinking) for row, one in enumerate(rules)):
        if budget is None:
            continue
        has_grammar = bool(seats.has_grammar[rows.histories[row]])
        if rows.output_indices[row] not in budget.indices(has_grammar=has_grammar):
            continue  # most rows, whose output is not copied
        if budget.is_spent(_output(rows, row).tolist(), has_grammar=has_grammar):
            tags[row] = budget.end_token_id
    if rows.allowed is None or not tags:
        return tags
    tokens = np.zeros(len(rows), np.int64)
    tokens[list(tags)] = list(tags.values())
    is_taken = rows.allowed.allows(tokens)
    return {row: tag for row, tag in tags.items() if is_taken[row]}


def _output(rows: SampledRows, row: int) -> np.ndarray:
    """Return the tokens of the output before the one that is drawn in a row."""
    end = rows.num_tokens[row]
    return rows.token_ids[rows.histories[row], end - rows.output_indices[row] : end]


def _withheld(
    rows: SampledRows,
    seats: Seats,
    ruled: np.ndarray,
    rules: Sequence[TokenRules],
    vocab_size: int,
    eos_token_ids: Set[int],
) -> list[list[int]]:
    """Return the tokens that each row must not draw; rows that are not in `ruled` have none."""
    withheld: list[list[int]] = [[] for _ in range(len(rows))]
    for row in ruled.tolist():
        history, output_index = rows.histories[row], int(rows.output_indices[row])
        params = seats.params[history]
        assert params is not None
        ids = [*withheld_token_ids(params, output_index, eos_token_ids)]
        if rules:
            ids += banned_token_ids(rules[row], _output(rows, row))
        # An id outside the vocabulary, of a client or a checkpoint, is never drawn anyway.
        withheld[row] = [one for one in ids if 0 <= one < vocab_size]
    return withheld


def _rules(seats: Seats, seat: int) -> TokenRules:
    params = seats.params[seat]
    assert params is not None
    return params.rules


class Sampler:
    """Draws tokens. A result is a function of a row and its `SampledRows` alone.

    Only its working memory is kept between calls, so one thread at a time may use it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._scratch = Scratch(vocab_size, get_num_threads())

    def draw(self, logits: np.ndarray, rows: SampledRows) -> tuple[np.ndarray, np.ndarray]:
        """Draw one token from each row of `logits`; return token ids and whether there is one.

        There is none where a row holds NaN or infinities, or where every token is withheld.
        `logits` is `[rows, vocab_size]`, float32, contiguous; it is not changed. Raises
        `InternalError` when its shape or type, or a token of a penalised history, does not fit.
        """
        vocab_size = self._scratch.counts.shape[1]
        wanted = (len(rows), vocab_size)
        if logits.shape != wanted or logits.dtype != np.float32 or not logits.flags.c_contiguous:
            raise InternalError(
                f"logits are {logits.dtype} {logits.shape}: wanted C-contiguous float32 {wanted}"
            )
        check_histories(rows, vocab_size)
        drawn, outcomes = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int8)
        scratch = self._scratch
        set_num_threads(scratch.num_threads)  # numba stores it per thread, and this one may be new
        # A thread without a row would only be waited for.
        most = min(scratch.num_threads, len(rows))
        with KERNEL_LOCK:
            sample_rows(
                logits, rows.ways, rows.output_indices, rows.token_ids, rows.histories,
                rows.num_prompts, rows.num_tokens, rows.withheld_starts, rows.withheld_ids,
                scratch.values[:most], scratch.maxima, scratch.depths, scratch.weights,
                scratch.sums, scratch.shallow, scratch.counts, scratch.listed_ids, scratch.listed,
                drawn, outcomes,
            )  # fmt: skip
        return drawn, outcomes == DRAWN


def check_histories(rows: SampledRows, vocab_size: int) -> None:
    """Raise `InternalError` for tokens that penalties look at and that are not of the vocabulary.

    The kernels do not check bounds.
    """
    is_penalised = rows.ways["has_penalties"] != 0
    if not is_penalised.any():
        return
    for row in np.flatnonzero(is_penalised):
        ids = rows.token_ids[rows.histories[row], : rows.num_tokens[row]]
        # As unsigned numbers, negative ids are huge.
        if len(ids) and ids.view(np.uint32).max() >= vocab_size:
            raise InternalError(
                f"token ids {ids.min()} to {ids.max()}: wanted 0 to {vocab_size - 1}, the "
                "vocabulary"
            )


def log_of_sum(logits: np.ndarray) -> float:
    """Return ln of the sum of e^logits of one row; NaN if one is not finite."""
    largest = logits.max()
    return float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))


def token_logprobs(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-softmax of one row of logits at the drawn token and at the likeliest ones."""
    log_sum = log_of_sum(logits)
    top = likeliest(logits, min(num_top, len(logits)))
    return TokenLogprobs(
        float(logits[token_id]) - log_sum,
        tuple((int(one), float(logits[one]) - log_sum) for one in top),
    )
