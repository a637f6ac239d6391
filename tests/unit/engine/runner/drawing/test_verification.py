"""Drafts change how many tokens a step yields and never which: tokens, log probabilities, KV."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.request import SamplingParams, TokenLogprobs
from engine.core.runner_contract import DrawnTokens, SampleInput, SequencesFailed
from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from tests.support.models.draws import sample_one
from tests.support.models.mtp_running import ids, only, slots, step
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.unit.engine.runner.drawing.drawn import drawn_from

PROMPT = prompt_of(21)
TABLE = [12, 3, 5, 1, 8, 20, 9, 10, 2, 6]
NUM_TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(max_tokens=99, temperature=0.0),
    "greedy_penalised": SamplingParams(
        max_tokens=99, temperature=0.0, frequency_penalty=0.7, presence_penalty=0.3, logprobs=3
    ),
    "sampled": SamplingParams(max_tokens=99, temperature=1.0, seed=11, logprobs=0),
    "filtered": SamplingParams(
        max_tokens=99, temperature=0.8, seed=12, top_k=20, top_p=0.9, min_p=0.02,
        repetition_penalty=1.3, presence_penalty=0.5, logprobs=5,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["numba qwen3", "paddle qwen3", "numba qwen3_yarn"], ids=str)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    backend, family = request.param.split()
    folder = write_checkpoint(tmp_path_factory.mktemp(family), CONFIGS[family])
    return load(folder, num_drafts=90, attention_backend=backend)


def with_logprobs(result: DrawnTokens) -> list[tuple[int, TokenLogprobs | None]]:
    """The drawn tokens, each with its log probabilities if there are any."""
    logprobs = result.logprobs or (None,) * len(result.token_ids)
    return list(zip(result.token_ids, logprobs, strict=True))


def _undisturbed(
    runner: ModelRunner, params: SamplingParams
) -> list[tuple[int, TokenLogprobs | None]]:
    known, computed = list(PROMPT), 0
    drawn: list[tuple[int, TokenLogprobs | None]] = []
    for _ in range(NUM_TOKENS):
        one = step(known, computed, TABLE, num_prompt=len(PROMPT), params=params)
        result = only(runner.execute(batch_of([one])))
        assert len(result.token_ids) == 1
        computed = len(known)
        known += ids(result)
        drawn += with_logprobs(result)
    return drawn


Undisturbed = tuple[list[tuple[int, TokenLogprobs | None]], np.ndarray]


@pytest.fixture(scope="module")
def undisturbed(runner: ModelRunner) -> dict[str, Undisturbed]:
    """What each of `PARAMS` draws without drafts, and the KV that is left in `TABLE`."""
    found = {}
    for name, params in PARAMS.items():
        runner.kv_bytes.fill(0)
        drawn = _undisturbed(runner, params)
        found[name] = drawn, slots(runner, TABLE, len(PROMPT) + NUM_TOKENS - 1)
    return found


@pytest.mark.covers("F139")
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("seed", range(4))
def test_any_drafts_give_the_same_tokens(
    runner: ModelRunner, undisturbed: dict[str, Undisturbed], name: str, seed: int
) -> None:
    """Right, wrong and half right ones, any number, with neighbours and without."""
    params, (wanted, clean) = PARAMS[name], undisturbed[name]
    num_computed = len(PROMPT) + NUM_TOKENS - 1
    runner.kv_bytes.fill(0)
    choose = random.Random(seed)
    known, computed = list(PROMPT), 0
    drawn: list[tuple[int, TokenLogprobs | None]] = []
    while len(drawn) < NUM_TOKENS:
        coming = [token_id for token_id, _ in wanted[len(drawn) :]]
        drafts = coming[: choose.randint(0, 9)]
        right = len(drafts)
        if drafts and choose.random() < 0.7:
            right = choose.randrange(len(drafts))
            drafts[right] = (drafts[right] + 1 + choose.randrange(95)) % 97
        one = step(known, computed, TABLE, drafts, num_prompt=len(PROMPT), params=params)
        neighbours = [step(prompt_of(5), 0, [30], [1, 2]), step(prompt_of(9), 0, [31])]
        batch = [*neighbours[: choose.randint(0, 2)], one]
        result = runner.execute(batch_of(batch))[-1]
        assert result is not None
        assert len(result.token_ids) == right + 1
        computed = len(known) + right
        known += ids(result)
        drawn += with_logprobs(result)
    if runner.attention_backend == "numba":
        assert drawn[:NUM_TOKENS] == wanted
        np.testing.assert_array_equal(slots(runner, TABLE, num_computed), clean)
    else:  # plain operators round differently with the number of rows
        assert [t for t, _ in drawn[:NUM_TOKENS]] == [t for t, _ in wanted]


def test_more_drafts_than_rows_of_logits_are_held(runner: ModelRunner) -> None:
    wanted = [token_id for token_id, _ in _undisturbed(runner, PARAMS["greedy"])]
    batch = [
        step(PROMPT, 0, TABLE, [*wanted[:30], *[0] * 60]),
        step(prompt_of(4), 0, [30, 31, 32], [0] * 30),
        step(PROMPT, 0, [40, 41, 42, 43, 44, 45, 46, 47], wanted[: NUM_TOKENS - 1]),
    ]
    first, second, third = runner.execute(batch_of(batch))
    assert first is not None
    assert second is not None
    assert third is not None
    assert ids(first)[:31] == wanted[:31]
    assert ids(second)[0] == ids(only(runner.execute(batch_of([step(prompt_of(4), 0, [30])]))))[0]
    assert ids(third) == wanted


@pytest.mark.covers("F139")
def test_each_place_is_drawn_with_its_own_noise_and_history() -> None:
    params = PARAMS["filtered"]
    logits = np.random.RandomState(0).standard_normal((4, 97)).astype(np.float32)
    drafts: list[int] = []
    wanted: list[tuple[int | None, TokenLogprobs | None]] = []
    for row in range(4):
        one = SampleInput(params, 4 + row, [1, 2], [3, 3, 5, 5, *drafts])
        wanted.append(sample_one(logits[row], one))
        assert wanted[-1][0] is not None
        drafts.append(wanted[-1][0])
    first = SampleInput(params, 4, [1, 2], [3, 3, 5, 5])
    for count in range(4):
        drawn = drawn_from(logits, first, drafts[:count])
        assert drawn is not None
        assert with_logprobs(drawn) == wanted[: count + 1]


def test_each_place_is_drawn_with_its_own_output_index() -> None:
    """Token 7 ends the output, is the likeliest everywhere, and may be drawn from index 3 on."""
    params = SamplingParams(max_tokens=9, min_tokens=3, temperature=0.0)
    logits = np.zeros((3, 97), np.float32)
    logits[:, 7], logits[:, 5] = 2, 1
    first = SampleInput(params, 1, [1], [5])
    for drafts, wanted in (([5, 5], [5, 5, 7]), ([7, 5], [5]), ([5, 7], [5, 5])):
        drawn = drawn_from(logits, first, drafts, frozenset({7}))
        assert drawn is not None
        assert list(drawn.token_ids) == wanted


def test_a_checkpoints_end_is_drawn_from_the_least_length_on(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3"])
    (likeliest,) = ids(only(load(folder).execute(batch_of([step(PROMPT, 0, TABLE)]))))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [likeliest]}))
    runner = load(folder)
    for min_tokens in (0, 1):
        params = SamplingParams(max_tokens=9, min_tokens=min_tokens, temperature=0.0)
        one = step(PROMPT, 0, TABLE, num_prompt=len(PROMPT), params=params)
        assert (ids(only(runner.execute(batch_of([one])))) == [likeliest]) == (min_tokens == 0)


def test_only_rows_that_are_needed_must_be_finite() -> None:
    logits = np.zeros((3, 97), np.float32)
    logits[:, 7] = 1
    logits[2] = math.nan
    first = SampleInput(PARAMS["greedy"], 0, [1], [])
    for drafts, count in (([8, 7], 1), ([7, 8], 2)):
        drawn = drawn_from(logits, first, drafts)
        assert drawn is not None
        assert len(drawn.token_ids) == count
    assert drawn_from(logits, first, [7, 7]) is None


def test_a_sequence_with_bad_logits_spares_its_neighbours_drafts(runner: ModelRunner) -> None:
    good = step(PROMPT, 0, TABLE)
    token = ids(only(runner.execute(batch_of([good]))))[0]
    drafted = step(PROMPT, 0, TABLE, [token, token])
    [wanted] = runner.execute(batch_of([drafted]))
    runner.kv_bytes[:, :, 50] = 0xFF
    bad = replace(step(prompt_of(20), 16, [50, 51], [1, 2]), sequence_id=7)
    with pytest.raises(SequencesFailed) as caught:
        runner.execute(batch_of([bad, drafted]))
    assert list(caught.value.errors) == [0]
    assert caught.value.results[0] is None
    found = caught.value.results[1]
    assert isinstance(found, DrawnTokens)
    assert wanted is not None
    assert ids(found) == ids(wanted)
