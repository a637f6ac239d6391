"""A runner without a model that notices every KV mistake.

The "KV" of a token is 8 bytes per layer, keys and values, that depend on the token, its position,
its layer and, as in a real model, on all tokens before it. The next token depends on every byte of
the sequence's KV as read back through its block table. A block that is lost, stale, swapped or not
computed changes the answer; `expected_tokens` says what it must be, computed without any cache.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from common.grammar import Grammar
from common.kv.kv_layout import KVLayout
from common.prompt_logprobs import PromptLogprobs
from common.request import SamplingParams
from engine.core.blocks.cache_copy import CacheCopy
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.runner_contract import (
    DrawnTokens,
    OnLayer,
    OnQueued,
    RunnerResult,
    SampleInput,
    ScheduledSequence,
    StepCosts,
)
from engine.core.sequences.stop_rules import withheld_token_ids
from engine.core.step.prompt_rows import prompt_rows
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.grammars.masks import GrammarMasks, PendingMasks
from tests.support.engine import hash_grammars

VOCAB_SIZE = hash_grammars.VOCAB_SIZE
NUM_LAYERS = 2
EOS_TOKEN_ID = hash_grammars.EOS_TOKEN_ID
TOKEN_BYTES = 8
STEP_FAILS = "the device is out of memory"
QUEUED = -1
Parts = Generator[int, None, RunnerResult]
"""A step that stops at its moments: when it is QUEUED, and when a layer, by number, can be sent."""


def layout(block_size: int) -> KVLayout:
    """Return a layout of 8 bytes per token, layer and key or value: one head of two float32."""
    return KVLayout(
        model_digest="hash-runner",
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=2,
        block_size=block_size,
        dtype="float32",
    )


class HashRunner:
    """Implements `node.life.node_parts.LoadedModel` over a numpy pool.

    Its proposals (`num_proposals`) are right or wrong by a hash of what comes before.
    """

    memory = None
    step_costs = StepCosts((1, 65), (1.0, 1.064))
    """Rows cost next to nothing, so drafts nearly always pay."""
    pairs_per_token = 16
    """Attention counts from the first few tokens, so that short prompts are cut by work too."""
    device = "a card"

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_model_len: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.layout = layout(block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len or num_blocks * block_size
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        shape = (NUM_LAYERS, 2, num_blocks, self.layout.piece_bytes)
        self.cache = np.zeros(shape, dtype=np.uint8)
        self.kv_bytes = np.zeros(shape, dtype=np.uint8)
        self.num_host_blocks = num_host_blocks
        self.host_cache = np.zeros((*shape[:2], num_host_blocks, shape[3]), dtype=np.uint8)
        self.batches: list[list[ScheduledSequence]] = []
        self.has_grammars = True
        self._grammars = GrammarMasks(
            hash_grammars.compiler(), VOCAB_SIZE, self.eos_token_ids, proposes=True
        )
        self.num_copy_polls = 0
        self.fail_next_copy = self.fail_next_step = False
        self.fail_after_layer: int | None = None
        """The layer after which a step fails once: it is computed, and was told of."""
        self.copies: list[LateCopy] = []
        """Copies that were begun and have not ended, in order."""
        self.goes_on: str = ""
        """The moment at which it computes a step that is offered after another one: `early`, with
        that one; `late`, when something else is asked for; empty: never before its own batch."""
        self.leaves_one_in = 0
        """It leaves one of so many tokens behind when it goes on; 0: none."""
        self._after: _StepAfter | None = None
        self.num_begun = self.num_forgotten = self.num_left_behind = 0

    def prepare_grammar(self, grammar: Grammar) -> Future[None] | None:
        """Begin to compile a grammar; None: it is compiled."""
        return self._grammars.prepare(grammar)

    def grammar_statistics(self) -> GrammarStatistics | None:
        """Return what following grammars took."""
        return self._grammars.statistics()

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    @property
    def host_kv(self) -> np.ndarray:
        """The host blocks."""
        return self.host_cache

    needs_staging = stages_landings = True
    card_pool = None

    @property
    def can_go_on(self) -> bool:
        """Whether it begins steps by itself."""
        return bool(self.goes_on)

    def begin_copy(self, copy: CacheCopy) -> LateCopy:
        """Copy as on a device with memory of its own, after `num_copy_polls` more looks."""
        self._end_after()
        late = LateCopy(self, copy, self.fail_next_copy)
        self.fail_next_copy = False
        self.copies.append(late)
        return late

    def copy_now(self, copy: CacheCopy) -> None:
        """Copy between the cache and host memory."""
        self._end_after()
        host = self.host_cache if copy.host_block_ids else self.kv_bytes
        ours, theirs = list(copy.block_ids), list(copy.host_block_ids or copy.block_ids)
        if copy.kind.is_out:
            host[:, :, theirs] = self.cache[:, :, ours]
        else:
            self.cache[:, :, ours] = host[:, :, theirs]

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy blocks into host memory."""
        self._end_after()
        self.host_cache[:, :, list(host_block_ids)] = self.cache[:, :, list(block_ids)]

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks back from host memory."""
        self._end_after()
        self.cache[:, :, list(block_ids)] = self.host_cache[:, :, list(host_block_ids)]

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        """Write the new tokens' KV, layer by layer; draw from all of it where asked to."""
        parts = self.parts(batch, tells_layers=on_layer is not None)
        return run_parts(parts, on_layer, on_queued)

    def parts(self, batch: Sequence[ScheduledSequence], *, tells_layers: bool) -> Parts:
        """Execute a batch from one moment to the next, as `execute` does; return its results.

        With `tells_layers` the moments at which layers can be sent are among them.
        """
        if self.fail_next_step:
            self.fail_next_step = False
            raise RuntimeError(STEP_FAILS)
        tells_layers = tells_layers or self.fail_after_layer is not None
        self.batches.append(list(batch))
        together = batch if isinstance(batch, StepBatch) else batch_of(batch)
        self._end_after()
        following, self._after = self._after, None
        pending = self._grammars.begin(together)
        if following is not None and together.continues is not None:
            results = self._take_begun(together, following, pending)
            yield QUEUED
            for layer in range(NUM_LAYERS if tells_layers else 0):
                yield from self._tell_of(layer, batch)
            return results
        assert together.continues is None, "a step that was never begun"
        self.num_forgotten += following is not None
        is_followed = bool(self.goes_on) and together.going_on is not None
        if not is_followed:
            yield QUEUED
        computed = [self._compute(scheduled) for scheduled in batch]
        for layer in range(NUM_LAYERS):
            for scheduled, states in zip(batch, computed, strict=True):
                self._write(layer, scheduled, states[-1])
            if tells_layers:
                yield from self._tell_of(layer, batch)
        results = self._results(together, computed, pending)
        if is_followed:
            yield QUEUED
        return results

    def _take_begun(
        self, batch: StepBatch, begun: _StepAfter, pending: PendingMasks | None
    ) -> RunnerResult:
        """Return the results of a step that was begun before its batch came."""
        assert batch.continues is not None
        places, masks = batch.continues.tolist(), _masks(batch, pending)
        results = RunnerResult(
            self._draw(scheduled, begun.states_of(place, scheduled), rows)
            for place, scheduled, rows in zip(places, batch, masks, strict=True)
        )
        self._go_on(batch, results)
        return results

    def _results(
        self, batch: StepBatch, computed: Sequence[list[bytes]], pending: PendingMasks | None
    ) -> RunnerResult:
        """Return the results of a step from the KV that it has computed of each entry."""
        scores = {
            rows.entry: _prompt_logprobs(
                computed[rows.entry][1:], rows.following.tolist(), rows.num_top
            )
            for rows in prompt_rows(batch)
        }
        masks = _masks(batch, pending)
        drawn = [
            self._draw(scheduled, states, rows)
            for scheduled, states, rows in zip(batch, computed, masks, strict=True)
        ]
        results = RunnerResult(drawn, scores)
        if pending is not None:
            self._grammars.propose(batch, results)
        self._go_on(batch, results)
        return results

    def _tell_of(self, layer: int, batch: Sequence[ScheduledSequence]) -> Iterator[int]:
        """Stop when a layer can be sent; fail afterwards if the step is to fail there."""
        self._stage_layer_out(layer, batch)
        yield layer
        if layer == self.fail_after_layer:
            self.fail_after_layer = None
            raise RuntimeError(STEP_FAILS)

    def _go_on(self, batch: StepBatch, results: RunnerResult) -> None:
        """Begin the step after `batch`, as a device does that has drawn its tokens.

        Of those that are left behind it has another token, as they are drawn on the host.
        """
        if not self.goes_on or batch.going_on is None:
            return
        entries, left_behind = [], set[int]()
        for entry in batch.going_on.tolist():
            before, drawn = batch[entry], results[entry]
            assert drawn is not None
            (token_id,), start = drawn.token_ids, before.start + 1
            assert start < len(before.block_table) * self.block_size, "no block to go on in"
            if self.leaves_one_in and (token_id + start) % self.leaves_one_in == 0:
                left_behind.add(entry)
                token_id = (token_id + 1) % VOCAB_SIZE
            table = list(before.block_table)
            entries.append(ScheduledSequence(0, (token_id,), start, table, None))
        self._after = _StepAfter(entries)
        results.left_behind = frozenset(left_behind)
        self.num_left_behind += len(left_behind)
        self.num_begun += 1
        batch.has_gone_on = True
        if self.goes_on == "early":
            self._after.compute(self)

    def _end_after(self) -> None:
        """Compute the step that was begun, if there is one: all else is queued after it."""
        if self._after is not None:
            self._after.compute(self)

    def _compute(self, scheduled: ScheduledSequence) -> list[bytes]:
        """Return the KV of all tokens up to each new one, from the token before the first on."""
        assert scheduled.token_ids, "there are no logits without a token to compute"
        states = [self._read(scheduled.block_table, scheduled.start)]
        for position, token_id in enumerate(scheduled.token_ids, scheduled.start):
            states.append(states[-1] + _token_kv(states[-1], token_id, position))
        return states

    def _draw(
        self,
        scheduled: ScheduledSequence,
        states: list[bytes],
        masks: Sequence[np.ndarray | None],
    ) -> DrawnTokens | None:
        sample = scheduled.sample
        if sample is None:
            assert scheduled.next_token_id is not None, "a chunk that ends within the known tokens"
            return None
        last = len(states) - scheduled.num_drafts - 1
        drafts = list(scheduled.token_ids[len(scheduled.token_ids) - scheduled.num_drafts :])
        drawn: list[int] = []
        while len(drawn) == 0 or (
            len(drawn) <= len(drafts) and drawn[-1] == drafts[len(drawn) - 1]
        ):
            index = sample.output_index + len(drawn)
            mask = masks[len(drawn)]
            drawn.append(_draw(states[last + len(drawn)], sample.params, index, mask))
        state = states[last + len(drawn) - 1]
        proposals = self._propose(state, drawn, sample, scheduled.num_proposals)
        return DrawnTokens(tuple(drawn), draft_token_ids=proposals)

    def _propose(
        self, state: bytes, drawn: list[int], sample: SampleInput, count: int
    ) -> tuple[int, ...]:
        """Return the right next tokens, of which about one in four is replaced by a wrong one."""
        position = len(state) // (TOKEN_BYTES * 2 * NUM_LAYERS)
        token_id, index = drawn[-1], sample.output_index + len(drawn)
        proposals = []
        for offset in range(count):
            state += _token_kv(state, token_id, position + offset)
            token_id = _draw(state, sample.params, index + offset)
            if state[-1] % 4 == 0:
                token_id = (token_id + 1) % VOCAB_SIZE
            proposals.append(token_id)
        return tuple(proposals)

    def _slots(self, block_table: Sequence[int], position: int) -> np.ndarray:
        block_id = block_table[position // self.block_size]
        offset = position % self.block_size * TOKEN_BYTES
        return self.cache[:, :, block_id, offset : offset + TOKEN_BYTES]

    def _read(self, block_table: Sequence[int], end: int) -> bytes:
        return b"".join(self._slots(block_table, p).tobytes() for p in range(end))

    def _write(self, layer: int, scheduled: ScheduledSequence, state: bytes) -> None:
        values = np.frombuffer(state, dtype=np.uint8).reshape(-1, NUM_LAYERS, 2, TOKEN_BYTES)
        for position in range(scheduled.start, len(values)):
            self._slots(scheduled.block_table, position)[layer] = values[position, layer]

    def _stage_layer_out(self, layer: int, batch: Sequence[ScheduledSequence]) -> None:
        """Copy the blocks that the batch writes in one layer, as on a device of its own."""
        for scheduled in batch:
            end = scheduled.start + len(scheduled.token_ids)
            first, last = scheduled.start // self.block_size, (end - 1) // self.block_size
            block_ids = list(scheduled.block_table[first : last + 1])
            self.kv_bytes[layer, :, block_ids] = self.cache[layer, :, block_ids]


def run_parts(
    parts: Parts, on_layer: OnLayer | None = None, on_queued: OnQueued | None = None
) -> RunnerResult:
    """Run a step to its end, and tell of its moments; return its results."""
    while True:
        try:
            moment = next(parts)
        except StopIteration as end:
            results: RunnerResult = end.value
            return results
        if moment == QUEUED and on_queued is not None:
            on_queued()
        if moment != QUEUED and on_layer is not None:
            on_layer(moment)


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Return the right answer, stops included, computed from tokens alone."""
    state = b""
    for position, token_id in enumerate(prompt):
        state += _token_kv(state, token_id, position)
    output: list[int] = []
    while True:
        allowed = None
        if sampling.grammar is not None:
            allowed = hash_grammars.allowed_after(sampling.grammar, output)
        token_id = _draw(state, sampling, len(output), allowed)
        output.append(token_id)
        ends = token_id == EOS_TOKEN_ID and not sampling.ignore_eos
        if ends or token_id in sampling.stop_token_ids or len(output) == sampling.max_tokens:
            return output
        state += _token_kv(state, token_id, len(prompt) + len(output) - 1)


def expected_prompt_logprobs(prompt: Sequence[int], num_top: int) -> PromptLogprobs:
    """Return the right log probabilities of a prompt, computed from tokens alone."""
    states = [b""]
    for position, token_id in enumerate(prompt[:-1]):
        states.append(states[-1] + _token_kv(states[-1], token_id, position))
    return _prompt_logprobs(states[1:], prompt[1:], num_top)


def _prompt_logprobs(
    states: Sequence[bytes], following: Sequence[int], num_top: int
) -> PromptLogprobs:
    logprobs, ranks, top_ids, top_logprobs = [], [], [], []
    for state, token_id in zip(states, following, strict=False):
        digest = hashlib.blake2b(state + token_id.to_bytes(4, "little"), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        logprobs.append(-(number % 4096) / 256)
        ranks.append(number % VOCAB_SIZE + 1)
        top_ids += [(number + i) % VOCAB_SIZE for i in range(num_top)]
        top_logprobs += [-(number % 256 + i) / 256 for i in range(num_top)]
    return PromptLogprobs(
        num_top, tuple(logprobs), tuple(ranks), tuple(top_ids), tuple(top_logprobs)
    )


def _token_kv(state: bytes, token_id: int, position: int) -> bytes:
    before = state[-TOKEN_BYTES * 2 * NUM_LAYERS :]
    return hashlib.blake2b(
        before + token_id.to_bytes(4, "little") + position.to_bytes(4, "little"),
        digest_size=TOKEN_BYTES * 2 * NUM_LAYERS,
    ).digest()


def _draw(
    state: bytes,
    sampling: SamplingParams,
    output_index: int,
    allowed: np.ndarray | None = None,
) -> int:
    assert allowed is None or allowed.any(), "a grammar allows nothing"
    noise = sampling.seed if sampling.temperature > 0 else 0
    key = noise.to_bytes(8, "little") + output_index.to_bytes(4, "little")
    digest = hashlib.blake2b(state, digest_size=8, key=key).digest()
    token_id = int.from_bytes(digest, "little") % VOCAB_SIZE
    withheld = withheld_token_ids(sampling, output_index, {EOS_TOKEN_ID})
    while token_id in withheld or not (allowed is None or allowed[token_id]):
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def _masks(batch: StepBatch, pending: PendingMasks | None) -> list[list[np.ndarray | None]]:
    """Return for each entry what each of its rows may draw."""
    counts = [
        int(n) + 1 if s else 0 for n, s in zip(batch.num_drafts, batch.is_sampled, strict=True)
    ]
    if pending is None:
        return [[None] * count for count in counts]
    masks = iter(hash_grammars.allowed_in(pending))
    return [[next(masks) for _ in range(count)] for count in counts]


class _StepAfter:
    """A step that the runner began by itself. What it draws is known when it is asked for."""

    def __init__(self, entries: list[ScheduledSequence]) -> None:
        self._entries = entries
        self._states: list[list[bytes]] = []
        self._lock = threading.Lock()

    def compute(self, runner: HashRunner) -> None:
        """Write keys and values, once."""
        with self._lock:
            for entry in self._entries[len(self._states) :]:
                self._states.append(runner._compute(entry))
                for layer in range(NUM_LAYERS):
                    runner._write(layer, entry, self._states[-1][-1])

    def states_of(self, place: int, scheduled: ScheduledSequence) -> list[bytes]:
        """Return what was computed at a place, which a batch takes for this entry."""
        ours = self._entries[place]
        assert (tuple(ours.token_ids), ours.start) == (
            tuple(scheduled.token_ids), scheduled.start
        ), "another step than the one that was begun"  # fmt: skip
        assert ours.block_table == list(scheduled.block_table)[: len(ours.block_table)]
        return self._states[place]


class LateCopy:
    """A copy whose bytes move at its very end, behind the copies that began before it.

    So a block that is reused too early is copied as it is then.
    """

    def __init__(self, runner: HashRunner, copy: CacheCopy, is_failing: bool) -> None:
        self._runner, self._copy, self._is_failing = runner, copy, is_failing
        self._num_polls = 0

    def is_done(self, *, may_begin: bool = True) -> bool:
        """Copy when it has been asked often enough."""
        runner = self._runner
        if self._num_polls < runner.num_copy_polls or runner.copies[0] is not self:
            self._num_polls += 1
            return False
        del runner.copies[0]
        if self._is_failing:
            raise RuntimeError("the device has no pinned memory")
        runner.copy_now(self._copy)
        return True
