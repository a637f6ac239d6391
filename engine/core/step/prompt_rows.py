"""Rows of a step whose logits say how likely the next token of a prompt was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.prompt_logprobs import PromptLogprobs, joined
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_batch import Ints, StepBatch


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The first rows of an entry of a batch, of which log probabilities are asked for.

    The prompt has token `following[i]` after row i. `num_top` likeliest tokens are reported.
    """

    entry: int
    num_top: int
    following: Ints


def prompt_rows(batch: StepBatch) -> list[PromptRows]:
    """Return the rows of a batch that are asked for; of the last token of a prompt none is.

    Once an output begins, its prompt was computed here before, or was answered by another node: a
    prompt that is computed again has no such rows.
    """
    seats = batch.seats
    num_top = seats.num_prompt_logprobs[batch.rows]
    if not (num_top >= 0).any():
        return []
    last = seats.num_prompt[batch.rows] - 1
    is_first_time = seats.num_known[batch.rows] == last + 1
    found = []
    for entry in np.flatnonzero((num_top >= 0) & is_first_time & (batch.starts < last)).tolist():
        row, start = batch.rows[entry], int(batch.starts[entry])
        end = min(start + int(batch.num_tokens[entry]), int(last[entry]))
        following = seats.token_ids[row, start + 1 : end + 1].astype(np.int64)
        found.append(PromptRows(entry, int(num_top[entry]), following))
    return found


def take_prompt_logprobs(sequence: Sequence) -> PromptLogprobs | None:
    """Return what the steps of a prompt found, once; None without such steps."""
    parts, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    return joined(parts) if parts else None
