"""Draws of given logits by a card's draw and by the host's, in every way that a request can ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.request import SamplingParams, TokenLogprobs
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import EMPTY_BATCH, batch_of
from engine.runner.drawing.draws import Draws, HostDraw
from engine.runner.drawing.sampler import SampledRows, sampled_rows
from engine.runner.gpu.drawing.card_draw import CardDraw
from engine.runner.gpu.drawing.staged_rules import staged_rules
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import AttentionShape, KVPool, Launches
from engine.runner.gpu.steps.decode_step import draw_sizes
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.weights.spec.model_spec import DecoderSpec

VOCABULARY = 5000
"""In the interpreter: three slices, the last one not a whole one."""
MAX_LEN = 3000
_HIDDEN: Any = SimpleNamespace(is_drawn=False, places_of=lambda rows: rows)


class GivenLogits:
    """A decoder whose logits are given; it counts how often it computed them for the card."""

    max_len = MAX_LEN

    def __init__(
        self, device: Any, make_kernel: Callable[[KernelSpec], Any], spec: DecoderSpec,
        most_rows: int, stream: int,
    ) -> None:  # fmt: skip
        nothing: Any = None
        self.device, self.spec, self.stream = device, spec, stream
        self.most_logits_rows = most_rows
        self.launches = Launches(
            make_kernel, device.properties, spec, nothing, KVPool(0, 1, 16, 1), AttentionShape()
        )
        sizes = draw_sizes(self.launches.num_slices, most_rows)
        sizes |= {"logits": 4 * most_rows * spec.vocab_size, "normed": 16}
        self.memory = StepMemory(device, sizes)
        staging = Staging(device, staged_rules(most_rows, spec.vocab_size))
        self.steps = SimpleNamespace(staging=staging)
        self.given = np.zeros((0, spec.vocab_size), np.float32)
        self.num_queued = 0

    def queue_logits(self, places: np.ndarray, normed: int = 0, logits: int = 0) -> None:
        self.num_queued += 1
        found = np.ascontiguousarray(self.given[places])
        self.device.upload_array(logits or self.memory["logits"], found)

    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.given[rows]
        return found


class Pair:
    """The card's draw and the host's, of the same logits."""

    def __init__(
        self, device: Any, make_kernel: Callable[[KernelSpec], Any], spec: DecoderSpec,
        most_rows: int, stream: int,
    ) -> None:  # fmt: skip
        decoder: Any = GivenLogits(device, make_kernel, spec, most_rows, stream)
        self.decoder, self.vocab_size = decoder, spec.vocab_size
        self.card = CardDraw(device, decoder)
        self._host = HostDraw(decoder, spec.vocab_size)

    def on_card(self, logits: np.ndarray, rows: SampledRows) -> Draws:
        """Return what the card draws."""
        self.decoder.given, self.decoder.num_queued = logits, 0
        return self.card.draw(_HIDDEN, np.arange(len(rows)), rows, EMPTY_BATCH)

    def on_host(self, logits: np.ndarray, rows: SampledRows) -> Draws:
        """Return what the host draws."""
        self.decoder.given = logits
        return self._host.draw(_HIDDEN, np.arange(len(rows)), rows, EMPTY_BATCH)

    def require_equal(self, logits: np.ndarray, rows: SampledRows) -> Draws:
        """Check what the card draws against what the host draws; return it."""
        found, expected = self.on_card(logits, rows), self.on_host(logits, rows)
        assert found.token_ids == expected.token_ids
        assert found.is_drawn == expected.is_drawn
        assert found.logprobs.keys() == expected.logprobs.keys()
        for row, one in found.logprobs.items():
            require_close(one, expected.logprobs[row])
        return found


def way(**given: Any) -> SamplingParams:
    """Return how a sequence is drawn."""
    return SamplingParams(max_tokens=9000, **given)


_SOME = tuple(range(0, 5000, 3))
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 1.5, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.1, "presence_penalty": -0.7, "frequency_penalty": 1.9},
]
RULES = [
    TokenRules(biases=((3, 40.0), (4999, 41.0), (2047, -100.0))),
    # Float32 sums of a token's biases, in their order.
    TokenRules(biases=((9, 30.3), (2048, 0.7), (9, 0.1), (9, 0.07), (2048, 36.6))),
    TokenRules(allowed_token_ids=_SOME, bad_words=((3,), (0,)), biases=((6, 2.5), (7, 100.0))),
]
MIXED = [
    *(way(temperature=0.0, **one) for one in PENALTIES),
    *(way(temperature=0.8, **one) for one in PENALTIES),
    *(way(temperature=1.2, top_k=40, top_p=0.9, **one) for one in PENALTIES),
    *(way(temperature=0.9, rules=one) for one in RULES),
    *(way(temperature=0.0, rules=one, logprobs=4) for one in RULES),
    *(way(top_p=0.8, rules=one, repetition_penalty=1.4, logprobs=20) for one in RULES),
    way(temperature=0.0, logprobs=0),
    way(temperature=1.0, logprobs=7, min_tokens=9000, stop_token_ids=(11, 2050)),
    way(temperature=1.0, min_p=0.1, logprobs=20, frequency_penalty=1.0),
    way(temperature=0.0),
    way(temperature=0.7, top_k=5),
]


def entry_of(
    rng: np.random.Generator, params: SamplingParams, num_prompt: int, num_output: int,
    drafts: Sequence[int] = (), vocab_size: int = VOCABULARY,
) -> ScheduledSequence:  # fmt: skip
    """A decoding sequence behind random tokens, of which many are there several times."""
    tokens = rng.integers(0, vocab_size, num_prompt + num_output)
    few = rng.integers(0, vocab_size, 5)
    is_one = rng.random(len(tokens)) < 0.6
    tokens[is_one] = few[rng.integers(0, 5, int(is_one.sum()))]
    prompt, output = tokens[:num_prompt].tolist(), tokens[num_prompt:].tolist()
    sample = SampleInput(replace(params, seed=int(rng.integers(2**63))), num_output, prompt, output)
    last = (prompt + output)[-1]
    return ScheduledSequence(
        0, [last, *drafts], len(tokens) - 1, [0], sample, num_drafts=len(drafts)
    )


def rows_behind(entries: Sequence[ScheduledSequence], vocab_size: int = VOCABULARY) -> SampledRows:
    """Return how the tokens after these entries are drawn."""
    return sampled_rows(batch_of(entries), vocab_size, {17})


def mixed(rng: np.random.Generator, vocab_size: int = VOCABULARY) -> list[ScheduledSequence]:
    """Return a sequence of each of `MIXED`."""
    lengths = rng.integers((1, 0), (60, 40), (len(MIXED), 2)).tolist()
    return [
        entry_of(rng, params, num_prompt, num_output, vocab_size=vocab_size)
        for params, (num_prompt, num_output) in zip(MIXED, lengths, strict=True)
    ]


def logits_for(
    rng: np.random.Generator, rows: SampledRows, scale: float = 4.0, digits: int = 1,
    vocab_size: int = VOCABULARY,
) -> np.ndarray:  # fmt: skip
    """Logits with ties, in which penalised tokens are likely and unlikely ones."""
    logits = np.round(rng.standard_normal((len(rows), vocab_size)) * scale, digits)
    for row in range(len(rows)):
        known = rows.token_ids[rows.histories[row], : rows.num_tokens[row]]
        logits[row, known] += rng.choice([0.0, 3 * scale], len(known))
    return logits.astype(np.float32)


def require_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    """The same tokens in the same order; values differ by the order of float64 sums."""
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    values = [found.logprob, *(value for _, value in found.top)]
    wanted = [expected.logprob, *(value for _, value in expected.top)]
    np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-12)
