"""The step after a planned one, which a runner may begin before that one has ended.

A device idles while the host reads the tokens of a step and plans the next one, unless the next one
is queued there already. What most next steps compute is certain before: one more token of every
sequence, the one that the step is about to draw.

The offer is made when a step is planned and taken, and never at the cost of anybody else:

    no waiting sequence could be admitted instead
    every sequence that goes on owns the block of its next position, taken now if enough are
        available: it would be taken in the next plan in any case, so that plan finds as many
        sequences with a block as it would have, and preempts the same ones

Those that end with the step by their length are left out. A step that was begun is then taken as it
is, without a plan, less the sequences that have ended or were aborted, and less those that the
runner has left behind: their token was not the one that the step has taken on the device. These are
computed in the step after, which is planned. Whatever arrives or lands meanwhile waits for one step
more, and nothing is offered after a step that somebody waits for.

It verifies no drafts: they are found in the tokens of the step before. So a node that drafts offers
nothing for some steps after it has found any (`core/step_after.py`).

What such a step writes is harmless, if sequences have left or not:

    where      at position p + 1 of a sequence whose token at p + 1 is drawn in the step before, in
               a block that it held, alone, when the step was queued: blocks that are shared or
               findable are full before position p + 1, as tokens are known only up to p
    if left    the block may belong to another sequence by then, or be free or cached; it is not
               findable by the hash of what was written, as a block is published only by a result
    in time    a step that computes into the block for its new owner is queued after it on the same
               stream, and so is every copy of KV to or from the device: it waits for the steps that
               are queued (`gpu/cache/copies.py`)

Blocks are given away by plans only: when the step that was begun has ended, or while it still runs
if none of its sequences is left. In that one case a writer that does not wait for the device's
stream, such as another process, would have to be kept from blocks of a plan until the step ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.core.policies.growth import Lacking
from engine.core.sequences.seats import Ints, Seats
from engine.core.step.step_in_flight import PlannedStep


@dataclass(frozen=True, slots=True)
class RowsAfter:
    """The entries of a step that go on after it, and which of these need blocks, by their index."""

    entries: Ints
    lacking: list[Lacking]


def rows_after(
    step: PlannedStep,
    seats: Seats,
    *,
    num_running: int,
    num_waiting: int,
    has_seat: bool,
    num_available: int,
    block_size: int,
) -> RowsAfter | None:
    """Return what may go on after `step`, which has taken its blocks; None: nothing may.

    `num_running` sequences run, `num_waiting` wait; `has_seat`: one of those could be given a seat.
    """
    batch = step.batch
    if not batch.is_plain_decodes:
        return None
    if len(batch) != num_running or _has_copies(step):
        return None
    known = seats.num_known.take(batch.rows)
    longest = seats.num_prompt.take(batch.rows) + seats.max_new_tokens.take(batch.rows)
    entries = np.flatnonzero(known + 1 < longest)
    has_seat |= len(entries) < len(batch)
    if not len(entries) or (num_waiting and has_seat):
        return None
    lacking = seats.lacking(batch.rows[entries], known[entries] + 1, block_size)
    if sum(num for _, num in lacking) > num_available:
        return None
    return RowsAfter(entries, lacking)


def _has_copies(step: PlannedStep) -> bool:
    """Return whether KV is copied for the step: it belongs to sequences that come or have gone."""
    return bool(step.swap_outs or step.swap_ins or step.swap_copies or step.reserved)
