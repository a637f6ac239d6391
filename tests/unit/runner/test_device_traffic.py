"""What a step copies to a device and reads back: nothing per layer, and one read per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.request import SamplingParams
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.runner.cache.kv_cache import KVCache
from engine.runner.model_runner import ModelRunner
from engine.runner.start import assemble, cache_size
from tests.fakes import fused_operators
from tests.fakes.counting_device import CountingDevice
from tests.unit.runner.running import host_draw, load, scheduled
from tests.unit.runner.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NUM_LAYERS = 4
PROMPTS = [prompt_of(length, length) for length in (40, 70, 33, 90)]
TABLES = [[0, 1, 2, 3], range(10, 16), range(20, 23), range(30, 36)]


class Counted:
    """A runner on a mirrored cache whose traffic is counted, also for each layer."""

    def __init__(self, folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_size, "KVCache", partial(KVCache, is_mirrored=True))
        if backend == "fused":
            monkeypatch.setattr(assemble, "_choose_backend", lambda *_: "fused")
            fused_operators.install(monkeypatch)
        self.runner: ModelRunner = load(folder, attention_backend="paddle")
        self.device = CountingDevice()
        self.device.install(monkeypatch)
        self.in_layers = 0
        run_layer = self.runner._decoder.run_layer

        def counted(index: int, hidden: Any) -> None:
            before = len(self.device.copies_in) + len(self.device.reads)
            run_layer(index, hidden)
            self.in_layers += len(self.device.copies_in) + len(self.device.reads) - before

        monkeypatch.setattr(self.runner._decoder, "run_layer", counted)

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        self.device.clear()
        self.in_layers = 0
        self.runner.execute(batch)


@pytest.fixture(params=["paddle", "fused"])
def counted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Counted:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3"] | {"num_hidden_layers": NUM_LAYERS})
    one = Counted(folder, request.param, monkeypatch)
    for prompt, table in zip(PROMPTS, TABLES, strict=True):
        one.runner.execute([scheduled(prompt[:-8], 0, table, is_sampled=False)])
    return one


def step(*counts: int) -> list[ScheduledSequence]:
    """The next tokens of each sequence."""
    return [
        scheduled(prompt[len(prompt) - 8 :][:count], len(prompt) - 8, table)
        for prompt, table, count in zip(PROMPTS, TABLES, counts, strict=False)
    ]


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1, 1), (1, 5, 1, 8)])
def test_a_decode_step_reads_once_and_copies_nothing_per_layer(
    counted: Counted, counts: tuple[int, ...]
) -> None:
    counted.execute(step(*counts))
    assert counted.in_layers == 0
    assert len(counted.device.reads) == 1
    assert len(counted.device.copies_in) <= 6


SAMPLED = [
    SamplingParams(max_tokens=9, temperature=1.0, seed=3),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=40, top_p=0.9, seed=4),
    SamplingParams(max_tokens=9, temperature=0.7, repetition_penalty=1.2, seed=5),
    SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=0.5),
]


def with_params(
    batch: Sequence[ScheduledSequence], params: Sequence[SamplingParams]
) -> list[ScheduledSequence]:
    """The batch with these parameters; all tokens but each first one are drafts."""
    return [
        replace(
            one,
            sample=SampleInput(given, 1, [7] * one.start, [one.token_ids[0]]),
            num_drafts=len(one.token_ids) - 1,
        )
        for one, given in zip(batch, params, strict=True)
    ]


def test_only_candidates_come_back_and_sampling_reads_once(counted: Counted) -> None:
    counted.execute(with_params(step(1, 3, 1, 1), SAMPLED))
    assert counted.in_layers == 0
    assert len(counted.device.reads) == 1
    assert len(counted.device.copies_in) <= 14


def test_log_probabilities_cost_one_more_read(counted: Counted) -> None:
    asked = [replace(params, logprobs=2) for params in SAMPLED[:2]]
    counted.execute(with_params(step(1, 1, 1, 1), [*asked, *SAMPLED[2:]]))
    assert len(counted.device.reads) == 2


@pytest.mark.parametrize("kind", ["bad_words", "biases", "allowed_token_ids"])
def test_rules_about_tokens_hold_on_a_device(counted: Counted, kind: str) -> None:
    """Each rule alone: the token that the device would draw is not drawn."""
    free = with_params(step(1, 1), SAMPLED[:2])
    first, second = counted.runner.execute(free)
    assert first is not None
    (token_id,) = first.token_ids
    other = (token_id + 1) % counted.runner.vocab_size
    rules = {
        "bad_words": TokenRules(bad_words=((token_id,),)),
        "biases": TokenRules(biases=((token_id, -100.0),)),
        "allowed_token_ids": TokenRules(allowed_token_ids=(other,)),
    }[kind]
    ruled, beside = counted.runner.execute(
        with_params(step(1, 1), [replace(SAMPLED[0], rules=rules), SAMPLED[1]])
    )
    assert ruled is not None
    assert ruled.token_ids != (token_id,)
    assert beside == second, "the sequence beside it has no rules"


def test_a_step_of_many_sequences_reads_once(counted: Counted) -> None:
    [one] = step(1)
    counted.execute(with_params([one] * 100, [SAMPLED[i % 4] for i in range(100)]))
    assert len(counted.device.reads) == 1


def test_rows_beyond_the_first_group_get_their_own_tokens(counted: Counted) -> None:
    """Also those that are read whole: a third of them, for log probabilities."""
    prompt, table = PROMPTS[3], TABLES[3]
    batch = with_params(
        [scheduled(prompt[at : at + 1], at, table) for at in range(80)],
        [replace(SAMPLED[at % 4], seed=at, logprobs=None if at % 3 else 1) for at in range(80)],
    )
    on_device = counted.runner.execute(batch)
    counted.runner._row_draw = host_draw(counted.runner)
    assert counted.runner.execute(batch) == on_device


def test_tokens_drawn_on_the_device_are_those_of_the_host(counted: Counted) -> None:
    batch = with_params(step(4, 3, 1, 2), SAMPLED)
    assert batch[2].sample is not None
    asked = replace(SAMPLED[2], logprobs=3)
    batch[2] = replace(batch[2], sample=replace(batch[2].sample, params=asked))
    on_device = counted.runner.execute(batch)
    counted.runner._row_draw = host_draw(counted.runner)
    assert counted.runner.execute(batch) == on_device


def test_chunks_beside_decoding_copy_nothing_per_layer(counted: Counted) -> None:
    chunk = scheduled(prompt_of(60), 0, range(40, 44))
    counted.execute([*step(1, 5, 1, 1), chunk])
    assert counted.in_layers == 0
    assert len(counted.device.reads) == 1
    assert len(counted.device.copies_in) <= 8


def test_what_is_copied_does_not_grow_with_the_context(counted: Counted) -> None:
    """Tables and positions of single rows: a few numbers per block, and none per key and row."""
    counted.execute(step(1, 1, 1, 1))
    assert sum(counted.device.copies_in) < 12_000
