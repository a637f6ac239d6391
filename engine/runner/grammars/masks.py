"""Which tokens a step may draw under grammars.

Where the host draws only the largest value, or the largest with noise, a row is drawn without a
mask and the matcher is asked about that one token, in microseconds: where it is allowed, the mask
would not have changed the draw. Where the grammar forces a token, that is the draw. Refused rows
are drawn again with a mask. Every other row's is filled on a thread while the layers compute.

A matcher belongs to a seat and is only a cache: its state is a function of the grammar and of the
output tokens. Where the seat has another sequence now, or tokens that the matcher has not seen, it
is made again or moved. Each draft's row has the mask after the drafts before it. After a draft
that the grammar refuses no row is used: that draft is never drawn.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from common.errors import InternalError, InvalidRequest, Overloaded, PdserveError
from common.grammar import Grammar
from common.request import GREEDY_BELOW
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.runner_contract import DrawnTokens
from engine.core.sequences.seats import Seats
from engine.core.step.step_batch import StepBatch
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.grammars.compiling import Preparation
from engine.runner.grammars.held_matcher import HeldMatcher, Matchers
from engine.runner.grammars.unmasked_rows import GrammarJob, UnmaskedRows, needs_no_mask
from grammars.compiler import is_beyond_limits

log = logging.getLogger("pdserve.engine")

MAX_FORCED = 16
"""Forced tokens that are proposed at a time."""


@dataclass(slots=True)
class Counters:
    """See `GrammarStatistics`. One thread writes each field, any may read."""

    num_masks: int = 0
    masks_s: float = 0.0
    waited_s: float = 0.0
    num_forced_drafted: int = 0
    num_forced_accepted: int = 0
    failures: dict[str, int] = field(default_factory=lambda: {"compile": 0, "follow": 0})


class PendingMasks:
    """The masks of a step, while a thread fills them, and the rows that are drawn without one."""

    def __init__(
        self,
        allowed: AllowedTokens,
        unmasked: UnmaskedRows | None,
        filled: Future[None] | None,
        failures: Mapping[int, PdserveError],
        counters: Counters,
    ) -> None:
        self.failures = failures
        """Why a seat's rows allow nothing, when the masks are filled."""
        self.unmasked = unmasked
        """The rows that are drawn without a mask, to be used after `wait`."""
        self._allowed = allowed
        self._filled = filled
        self._counters = counters

    def wait(self) -> AllowedTokens:
        """Return the masks when they are filled."""
        if self._filled is not None:
            began_s = time.perf_counter()
            self._filled.result()
            self._counters.waited_s += time.perf_counter() - began_s
        return self._allowed


class GrammarMasks:
    """The matchers of a runner's seats. The runner's thread calls it, one step after the other."""

    def __init__(
        self,
        matchers: Matchers,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        proposes: bool,
    ) -> None:
        """Take matchers from `matchers`; propose forced tokens if it `proposes`."""
        self._matchers = matchers
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = eos_token_ids
        self._proposes = proposes
        self._seats: dict[int, HeldMatcher] = {}
        self._num_forced: dict[int, int] = {}
        self.counters = Counters()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdserve-masks")
        self._preparation = Preparation(matchers)

    def prepare(self, grammar: Grammar) -> Future[None] | None:
        """Begin to compile a grammar that will be needed, on any thread; None: it is compiled.

        The future has the error, `InvalidRequest`, of a grammar that cannot be followed. Raises
        `Overloaded` while too many wait.
        """
        return self._preparation.begin(grammar)

    def statistics(self) -> GrammarStatistics:
        """Return what following grammars took so far, on any thread."""
        counted, matchers = self.counters, self._matchers
        failures = dict(counted.failures)
        failures["compile"] += self._preparation.num_failed
        return GrammarStatistics(
            compile_s=matchers.compile_s(),
            lookups=matchers.lookups(),
            num_cached=matchers.num_cached,
            cached_bytes=matchers.cached_bytes,
            num_masks=counted.num_masks,
            masks_s=counted.masks_s,
            waited_s=counted.waited_s,
            num_forced_drafted=counted.num_forced_drafted,
            num_forced_accepted=counted.num_forced_accepted,
            failures=failures,
        )

    def begin(self, batch: StepBatch, *, asks_afterwards: bool = True) -> PendingMasks | None:
        """Begin to find the masks of a batch; None where it draws without grammars.

        Without `asks_afterwards` every row under a grammar has one.
        """
        seats = batch.seats
        self._leave_seats(seats)
        is_needed = batch.is_sampled & seats.has_grammar[batch.rows]
        if not is_needed.any():
            return None
        counts = np.where(batch.is_sampled, batch.num_drafts + 1, 0)
        first_rows = np.cumsum(counts) - counts
        mask_rows = np.full(int(counts.sum()), -1, np.int64)
        unmasked_rows = mask_rows.copy()
        jobs, unmasked, num_masks = list[GrammarJob](), list[GrammarJob](), 0
        entries = np.flatnonzero(is_needed)
        rows = batch.rows[entries]
        for seat, count, first_row, first, known in zip(
            rows.tolist(), counts[entries].tolist(), first_rows[entries].tolist(),
            seats.num_prompt[rows].tolist(), seats.num_known[rows].tolist(), strict=True,
        ):  # fmt: skip
            params = seats.params[seat]
            assert params is not None
            tokens = seats.token_ids[seat, first : known + count - 1].tolist()
            output, drafts = tokens[: known - first], tokens[known - first :]
            job = GrammarJob(seat, num_masks, params, output, drafts)
            if asks_afterwards and needs_no_mask(job):
                unmasked_rows[first_row] = len(unmasked)
                unmasked.append(job)
                continue
            jobs.append(job)
            mask_rows[first_row : first_row + count] = np.arange(num_masks, num_masks + count)
            num_masks += count
        # Rows that are not filled stand after what ends the output or is never drawn.
        allowed = AllowedTokens(mask_rows, np.full((num_masks, self._num_words), -1, np.int32))
        self._num_forced = {job.seat: self._count_forced(job) for job in jobs if job.drafts}
        failures: dict[int, PdserveError] = {}
        filled = None
        absent = [job for job in unmasked if not self._has_matcher(job)]
        if jobs or absent:
            filled = self._thread.submit(self._fill_all, jobs, allowed.masks, failures, absent)
        later = UnmaskedRows(self, unmasked, unmasked_rows, failures) if unmasked else None
        return PendingMasks(allowed, later, filled, failures, self.counters)

    def _leave_seats(self, seats: Seats) -> None:
        """Drop the matchers of requests that have left: what is held of a grammar is kept."""
        for seat in list(self._seats):
            params = seats.params[seat]
            if params is None or params.grammar is None:
                del self._seats[seat]

    def checked(self, job: GrammarJob, token_id: int, logits: np.ndarray) -> int | None:
        """Return what the job draws with its mask, having drawn `token_id` from `logits` without.

        None: that takes the mask. The matcher has consumed the token, unless it ends the output.
        """
        try:
            held = self._seat(job)
            forced = held.next_forced()
            if forced:
                token_id = forced[0]
            elif not self._is_drawn_with_mask(job, held.matcher, token_id, logits):
                return None
            if token_id in self._eos_token_ids:
                return token_id if held.matcher.is_accepting() else None
            held.consume(token_id)
        except Exception:  # filling the mask fails too, and reports it
            return None
        return token_id

    def _is_drawn_with_mask(
        self, job: GrammarJob, matcher: LLMatcher, token_id: int, logits: np.ndarray
    ) -> bool:
        """Return whether the matcher allows what the draw depends on.

        With noise that is the likeliest token too: depths below another one may differ in the last
        bits.
        """
        if not self._allows(matcher, token_id):
            return False
        if job.params.temperature < GREEDY_BELOW:
            return True
        likeliest = int(logits.argmax())
        return likeliest == token_id or self._allows(matcher, likeliest)

    def _allows(self, matcher: LLMatcher, token_id: int) -> bool:
        if token_id in self._eos_token_ids:
            return bool(matcher.is_accepting())
        return bool(matcher.validate_tokens([token_id]) == 1)

    def fill(self, jobs: Sequence[GrammarJob], failures: dict[int, PdserveError]) -> AllowedTokens:
        """Return the masks of jobs without drafts; write into `failures` why a seat has none."""
        masks = np.full((len(jobs), self._num_words), -1, np.int32)
        numbered = [replace(job, first_row=number) for number, job in enumerate(jobs)]
        self._fill_all(numbered, masks, failures)
        return AllowedTokens(np.arange(len(jobs)), masks)

    def propose(self, batch: StepBatch, results: Sequence[DrawnTokens | None]) -> None:
        """Write into `results` which tokens the grammars force after those that were drawn."""
        if not self._proposes:
            return
        is_needed = batch.is_sampled & batch.seats.has_grammar[batch.rows]
        for entry in np.flatnonzero(is_needed).tolist():
            seat = int(batch.rows[entry])
            drawn, held = results[entry], self._seats.get(seat)
            if drawn is not None and held is not None:
                num_accepted = min(self._num_forced.get(seat, 0), len(drawn.token_ids) - 1)
                self.counters.num_forced_accepted += num_accepted
                drawn.forced_token_ids = self._forced(batch, entry, drawn, held)

    def _count_forced(self, job: GrammarJob) -> int:
        """Return how many of the job's first drafts are those that its grammar forces."""
        held = self._seats.get(job.seat)
        if held is None or held.grammar != job.params.grammar or held.num_before != len(job.output):
            return 0
        num_forced = 0
        for draft, forced in zip(job.drafts, held.forced, strict=False):
            if draft != forced:
                break
            num_forced += 1
        self.counters.num_forced_drafted += num_forced
        return num_forced

    def _forced(
        self, batch: StepBatch, entry: int, drawn: DrawnTokens, held: HeldMatcher
    ) -> tuple[int, ...]:
        if not self._eos_token_ids.isdisjoint(drawn.token_ids):
            return ()  # accepted drafts after the end are not part of the output
        seats, seat = batch.seats, int(batch.rows[entry])
        first, known = int(seats.num_prompt[seat]), int(seats.num_known[seat])
        output = [*seats.token_ids[seat, first:known].tolist(), *drawn.token_ids]
        try:
            held.move(output)
        except InternalError:  # the next step makes another matcher, and reports it
            del self._seats[seat]
            return ()
        held.num_before = len(held.token_ids)
        if held.matcher.is_stopped() and len(self._eos_token_ids) == 1:
            held.forced = tuple(self._eos_token_ids)
        else:
            held.forced = tuple(held.matcher.compute_ff_tokens()[:MAX_FORCED])
        return held.forced

    def _has_matcher(self, job: GrammarJob) -> bool:
        held = self._seats.get(job.seat)
        return held is not None and held.grammar == job.params.grammar

    def _fill_all(
        self,
        jobs: Sequence[GrammarJob],
        masks: np.ndarray,
        failures: dict[int, PdserveError],
        absent: Sequence[GrammarJob] = (),
    ) -> None:
        """Fill the masks of all jobs; write into `failures` why a seat has none.

        The seats of `absent` get their matchers.
        """
        began_s = time.thread_time()
        for job in absent:
            with contextlib.suppress(Exception):  # checking the draw fails too
                self._seat(job)
        for job in jobs:
            rows = masks[job.first_row : job.first_row + len(job.drafts) + 1]
            failure = self._why_not_filled(job, rows)
            if failure is None:
                continue
            # Nothing is allowed in these rows, so this request fails, and no other one.
            rows[:] = 0
            failures[job.seat] = failure
            is_refused = isinstance(failure, InvalidRequest)
            self.counters.failures["compile" if is_refused else "follow"] += 1
            # Other requests may have used up what this compilation may hold: the next ones get
            # another. No step waits for it.
            assert job.params.grammar is not None
            self._matchers.forget(job.params.grammar)
        self.counters.num_masks += len(masks)
        self.counters.masks_s += time.thread_time() - began_s

    def _why_not_filled(self, job: GrammarJob, masks: np.ndarray) -> PdserveError | None:
        """Fill the masks of a job; return why that cannot be done."""
        try:
            self._fill(job, masks)
        except Exception as error:
            self._seats.pop(job.seat, None)
            if isinstance(error, InvalidRequest):
                return error
            num_tokens = len(job.output)
            # On every node, or where there is no room for this grammar to grow: the request's own.
            if isinstance(error, Overloaded) or is_beyond_limits(str(error)):
                return InvalidRequest(
                    f"the grammar is too large to be followed behind {num_tokens} tokens: {error}"
                )
            if not self._matchers.writes_every_byte:
                return InvalidRequest(
                    f"the grammar cannot be followed behind {num_tokens} tokens: it wants a text "
                    "that the tokens of this model do not write"
                )
            log.error("a grammar cannot be followed behind %d tokens: %s", num_tokens, error)
            return InternalError(
                f"a grammar cannot be followed behind {num_tokens} tokens: {error}"
            )
        return None

    def _fill(self, job: GrammarJob, masks: np.ndarray) -> None:
        """Write the mask of each row; raise `PdserveError` where there is none."""
        held = self._seat(job)
        held.growth.begin()
        try:
            self._fill_rows(job, held, masks)
        finally:
            grown = held.growth.end()
        if grown:
            self._matchers.grow(held.grammar, grown)

    def _fill_rows(self, job: GrammarJob, held: HeldMatcher, masks: np.ndarray) -> None:
        for number in range(len(job.drafts) + 1):
            fill_next_token_bitmask(held.matcher, masks, number)
            if held.matcher.is_error() or not masks[number].any():
                raise InternalError(held.matcher.get_error() or "it allows no token")
            num_tokens = len(job.output) + number
            self._withhold_ends_of_text(held.matcher, num_tokens, masks[number])
            self._withhold_early_ends(job, num_tokens, masks[number])
            if number == len(job.drafts):
                return
            draft = job.drafts[number]
            is_end = draft in self._eos_token_ids
            if is_end or not _is_allowed(masks[number], draft):
                return
            held.consume(draft)

    def _seat(self, job: GrammarJob) -> HeldMatcher:
        """Return the seat's matcher with the job's output consumed."""
        grammar = job.params.grammar
        assert grammar is not None
        held = self._seats.get(job.seat)
        if held is None or held.grammar != grammar or not held.can_move(job.output):
            held = self._seats[job.seat] = HeldMatcher(grammar, self._matchers.kept(grammar), [])
        self._matchers.count_followed(grammar, len(job.output) - len(held.token_ids))
        held.move(job.output)
        return held

    def _withhold_ends_of_text(self, matcher: LLMatcher, num_tokens: int, mask: np.ndarray) -> None:
        """Allow no end where the answer may not end.

        Some models end their answers with a token that has a text too, as a line feed: a grammar
        allows that text within an answer, and the token would end it there.
        """
        if matcher.is_accepting() or not any(_is_allowed(mask, end) for end in self._eos_token_ids):
            return
        mask[:] = _without(self._eos_token_ids, mask)
        if not mask.any():
            raise InvalidRequest(
                f"the grammar cannot be followed behind {num_tokens} tokens: it wants a text that "
                "ends the answers of this model"
            )

    def _withhold_early_ends(self, job: GrammarJob, output_index: int, mask: np.ndarray) -> None:
        """Before `min_tokens` allow no end, unless the grammar allows nothing else."""
        if output_index >= job.params.min_tokens:
            return
        left = _without((*self._eos_token_ids, *job.params.stop_token_ids), mask)
        if left.any():
            mask[:] = left


def _without(token_ids: Iterable[int], mask: np.ndarray) -> np.ndarray:
    """Return what a mask allows besides these tokens."""
    left = mask.copy()
    for token_id in token_ids:
        if 0 <= token_id < 32 * len(mask):
            left.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return left


def _is_allowed(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1)
