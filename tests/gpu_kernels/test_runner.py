"""A runner on the GPU back end, in the interpreter: real steps, a real cache, real checkpoints.

The kernels run on host memory in the card's place; everything else is what a node has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from engine.core.step.step_batch import batch_of

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import FAMILIES, PROMPT, TABLE, computed, on_card  # isort: skip

import numpy as np
import pytest

from common.errors import InternalError
from common.request import SamplingParams, TokenLogprobs
from common.token_rules import TokenRules
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.runner_contract import SampleInput, ScheduledSequence, SequencesFailed
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.gpu.drawing.edit_launches import HISTORY_TOKENS, LISTED_TOKENS
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels.interpreted import InterpretedDevice
from tests.support.engine.moved_blocks import move_blocks
from tests.support.models.running import host_draw, load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

pytestmark = pytest.mark.usefixtures("interpreted_card")
OTHERS = [[6, 7, 8], [10, 11, 12], [13, 14, 15]]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@pytest.fixture(params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, FAMILIES[request.param])


def test_logits_are_those_of_the_cpu(folder: Path) -> None:
    """bfloat16 beside float32: equal up to its rounding."""
    ours = computed(on_card(folder), PROMPT, [])
    exact = computed(load(folder, 64, activation_dtype="float32"), PROMPT, [])
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.06


@pytest.mark.parametrize("name", ["smollm3", "glm4", "phi4_mini", "granite"])
def test_layers_and_heads_without_rotation_are_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    """Whole layers, and a part of each head; factors that multiply rotated dimensions alone."""
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    ours = computed(on_card(folder), PROMPT, [])
    assert np.array_equal(computed(on_card(folder), PROMPT, [16, 39]), ours)
    exact = computed(load(folder, 64, activation_dtype="float32"), PROMPT, [])
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.06


@pytest.fixture
def whole(folder: Path) -> np.ndarray:
    return computed(on_card(folder), PROMPT, [])


@pytest.mark.parametrize("cuts", [(1,), (16, 17, 33), (39,), (36, 37, 38, 39)])
def test_a_prompt_cut_anywhere_has_the_same_bits(
    folder: Path, whole: np.ndarray, cuts: Sequence[int]
) -> None:
    """Chunks, and at the ends single rows, which are graphs."""
    assert np.array_equal(computed(on_card(folder), PROMPT, cuts), whole)


def test_rows_beside_others_have_the_same_bits(tmp_path: Path) -> None:
    """A decoding row and a chunk in one step, beside other sequences in any order."""
    folder = write_checkpoint(tmp_path, FAMILIES["qwen3"])
    runner = on_card(folder)
    whole = computed(on_card(folder), PROMPT, [])
    computed(runner, PROMPT[:39], [])
    others = [scheduled(prompt_of(count, count), 0, table) for count, table in
              zip((1, 7, 20), OTHERS, strict=True)]  # fmt: skip
    mine = scheduled(PROMPT[39:], 39, TABLE)
    for place in (0, 3):
        batch = [*others[:place], mine, *others[place:]]
        assert np.array_equal(logits_of(runner, *batch)[place], whole)
    behind = scheduled(PROMPT[20:], 20, TABLE)
    assert np.array_equal(logits_of(runner, others[0], behind, others[2])[1], whole)


def behind_prompts(*params: SamplingParams) -> list[ScheduledSequence]:
    """A step that draws behind the prompt's tokens, one sequence for each of `params`."""
    return [
        ScheduledSequence(0, PROMPT[39:], 39, TABLE, SampleInput(one, 0, PROMPT, []))
        for one in params
    ]


WAYS = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=1.0, seed=3),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=4, top_p=0.9, seed=4),
    SamplingParams(max_tokens=9, temperature=1.0, repetition_penalty=1.2, seed=5, logprobs=2),
]
LEFT = replace(WAYS[1], top_p=1 - 1e-13, presence_penalty=0.5, logprobs=1)
"""A row whose last kept token depends on the order of sums, so that the host draws it."""


@pytest.fixture
def filled(tmp_path: Path) -> ModelRunner:
    """A runner that has computed all but the prompt's last token."""
    runner = on_card(write_checkpoint(tmp_path, FAMILIES["qwen2"]))
    runner.execute(batch_of([scheduled(PROMPT[:39], 0, TABLE, is_sampled=False)]))
    return runner


SOME = TokenRules(allowed_token_ids=(3, 31, 32, 77, 200))
MASKED = [
    replace(GREEDY, rules=SOME),
    replace(WAYS[2], rules=SOME),
    replace(WAYS[1], rules=TokenRules(bad_words=((5,), (6,)), allowed_token_ids=(5, 6, 7, 8))),
    replace(WAYS[1], min_tokens=2, stop_token_ids=(1, 2, 3)),
]


@pytest.mark.parametrize("ways", [WAYS, MASKED], ids=["ways", "masked"])
def test_tokens_drawn_on_the_card_are_those_of_the_host(
    filled: ModelRunner, ways: list[SamplingParams]
) -> None:
    """The same logits, whichever draws: with a temperature of 1, which both hold exactly."""
    batches = [behind_prompts(*(replace(one, seed=seed) for one in ways)) for seed in range(2)]
    on_device = [filled.execute(batch_of(batch)) for batch in batches]
    filled._row_draw = host_draw(filled)
    for batch, drawn in zip(batches, on_device, strict=True):
        for found, expected in zip(drawn, filled.execute(batch_of(batch)), strict=True):
            assert found is not None
            assert expected is not None
            assert found.token_ids == expected.token_ids
            require_close(found.logprobs, expected.logprobs)


def require_close(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Equal but for the order in which float64 numbers are added."""
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
        for (_, mine), (_, theirs) in zip(one.top, other.top, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


def test_penalised_draws_and_log_probabilities_are_those_of_any_step(filled: ModelRunner) -> None:
    """A prompt's chunk or its last row, alone or among others: the same to the last bit."""
    ways = [WAYS[3], replace(WAYS[0], logprobs=3, frequency_penalty=0.7), LEFT]
    alone = [filled.execute(batch_of(behind_prompts(one)))[0] for one in ways]
    assert all(one is not None and one.logprobs for one in alone)
    assert filled.execute(batch_of(behind_prompts(WAYS[2], *ways)))[1:] == alone
    whole = [
        ScheduledSequence(0, PROMPT[start:], start, TABLE, SampleInput(one, 0, PROMPT, []))
        for start, one in zip((0, 17, 38), ways, strict=True)
    ]
    assert [filled.execute(batch_of([one]))[0] for one in whole] == alone


def test_only_rows_that_the_host_draws_are_read(
    filled: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bytes of each other row leave the card; logits come in one copy."""
    reads: list[int] = []
    decoder: Any = filled.decoder
    device: Any = decoder.device
    copy = device.copy

    def counted(to: int, source: int, size: int, stream: int) -> None:
        if size % (4 * filled.vocab_size) == 0:
            reads.append(size)
        copy(to, source, size, stream)

    monkeypatch.setattr(device, "copy", counted)
    filled.execute(batch_of(behind_prompts(*WAYS)))
    assert reads == []
    filled.execute(batch_of(behind_prompts(LEFT, WAYS[2], LEFT, LEFT)))
    assert reads == [3 * 4 * filled.vocab_size]
    reads.clear()
    found = filled.execute(batch_of(behind_prompts(*MASKED)))
    assert reads == []
    tokens = [one.token_ids[0] for one in found if one is not None]
    assert {*tokens[:2]} <= {*SOME.allowed_token_ids}
    assert tokens[2] in (7, 8)
    assert tokens[3] not in (1, 2, 3)


def test_a_row_without_an_allowed_token_is_told(filled: ModelRunner) -> None:
    """The host finds out why there is none; the other rows are drawn."""
    word = TokenRules(bad_words=((PROMPT[-1], 7),), allowed_token_ids=(7,))
    params = [replace(one, rules=word) for one in WAYS[:3]]
    step = [
        ScheduledSequence(0, PROMPT[39:], 39, TABLE, SampleInput(one, 1, PROMPT[:39], PROMPT[39:]))
        for one in params
    ]
    with pytest.raises(SequencesFailed, match="no token is left") as caught:
        filled.execute(batch_of([*step, *behind_prompts(GREEDY)]))
    assert sorted(caught.value.errors) == [0, 1, 2]


def test_rows_that_are_not_finite_have_no_token(filled: ModelRunner) -> None:
    decoder: Any = filled.decoder
    not_a_number = np.full(decoder.spec.hidden_size, 0x7FC0, np.uint16)
    decoder.device.upload_array(decoder.launches.weights.final_norm, not_a_number)
    with pytest.raises(SequencesFailed, match="not finite") as caught:
        filled.execute(batch_of(behind_prompts(*WAYS[:3])))
    assert sorted(caught.value.errors) == [0, 1, 2]


WAYS_TO_VERIFY = [
    GREEDY,
    replace(GREEDY, frequency_penalty=0.5, repetition_penalty=1.1, logprobs=2),
    replace(WAYS[1], max_tokens=9),
]


@pytest.mark.parametrize("params", WAYS_TO_VERIFY, ids=["greedy", "penalised", "filtered"])
@pytest.mark.parametrize("num_drafts", [3, 0], ids=["in a graph", "in a chunk"])
def test_drafts_are_verified_as_one_by_one(
    tmp_path: Path, params: SamplingParams, num_drafts: int
) -> None:
    """The tokens and log probabilities are those of single steps, and so are the logits.

    A node that drafts has graphs for four rows of a sequence; for another one they are a chunk.
    The second draft begins a block.
    """
    folder = write_checkpoint(tmp_path, FAMILIES["qwen2"])
    runner = on_card(folder, max_num_seqs=1, num_drafts=num_drafts)
    runner.execute(batch_of([scheduled(PROMPT[:30], 0, TABLE, is_sampled=False)]))
    prompt = PROMPT[:31]
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    alone: list[np.ndarray] = []
    for count in range(3):
        sample = SampleInput(params, count, prompt, tokens.copy())
        last = [*prompt, *tokens][-1:]
        one = ScheduledSequence(0, last, 30 + count, TABLE, sample)
        alone += list(logits_of(runner, one))
        [found] = runner.execute(batch_of([one]))
        assert found is not None
        tokens += found.token_ids
        logprobs += found.logprobs
    drafted = [*prompt[30:], *tokens[:2], (tokens[2] + 1) % runner.vocab_size]
    sample = SampleInput(params, 0, prompt, [])
    verified = ScheduledSequence(0, drafted, 30, TABLE, sample, num_drafts=3)
    assert np.array_equal(logits_of(runner, verified)[:3], alone)
    [found] = runner.execute(batch_of([verified]))
    assert found is not None
    assert list(found.token_ids) == tokens
    assert list(found.logprobs) == logprobs


def refuse_to_pin(*_: object) -> NoReturn:
    raise GpuError("cuMemHostRegister_v2: not supported (801)")


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "buffers"])
def test_blocks_go_out_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    """What a step wrote goes to slots of a ring and from those of another to another cache."""
    if not is_pinned:
        monkeypatch.setattr(InterpretedDevice, "register", refuse_to_pin)
    folder = write_checkpoint(tmp_path, FAMILIES["qwen3"])
    ours, theirs = on_card(folder), on_card(folder)
    told: list[int] = []
    ours.execute(batch_of([scheduled(PROMPT[:39], 0, TABLE, is_sampled=False)]), told.append)
    assert told == [0, 1]
    moved = [2, 8, 0]
    move_blocks(ours.card_pool, theirs.card_pool, ours.layout, TABLE, moved)
    [here] = logits_of(ours, scheduled(PROMPT[39:], 39, TABLE))
    [there] = logits_of(theirs, scheduled(PROMPT[39:], 39, moved))
    assert np.array_equal(here, there)


def test_memory_that_draws_hold_on_the_card_is_part_of_the_plan(filled: ModelRunner) -> None:
    penalties, biases = 4 * HISTORY_TOKENS, 8 * LISTED_TOKENS
    logits = 4 * filled.vocab_size
    assert filled.memory is not None
    assert filled.memory.step_buffer_bytes > penalties + biases + logits


def test_blocks_that_wait_in_host_memory_come_back(tmp_path: Path) -> None:
    """As swapped blocks do, beside the steps."""
    runner = on_card(write_checkpoint(tmp_path, FAMILIES["qwen3"]), host_space=1 << 18)
    assert runner.num_host_blocks >= 5
    runner.execute(batch_of([scheduled(PROMPT[:39], 0, TABLE, is_sampled=False)]))
    [before] = logits_of(runner, scheduled(PROMPT[39:], 39, TABLE))
    places, moved = [4, 0, 2], [2, 8, 0]
    for kind, block_ids in ((CopyKind.SWAP_OUT, TABLE), (CopyKind.SWAP_IN, moved)):
        copy = runner.begin_copy(CacheCopy(kind, block_ids, places))
        while not copy.is_done():
            pass
    [after] = logits_of(runner, scheduled(PROMPT[39:], 39, moved))
    assert np.array_equal(before, after)


def test_flows_stage_nothing_where_connectors_reach_the_card(tmp_path: Path) -> None:
    runner = on_card(write_checkpoint(tmp_path, FAMILIES["qwen3"]))
    assert runner.needs_staging
    assert not runner.stages_landings
    with pytest.raises(InternalError, match="it has no host view"):
        _ = runner.kv_bytes
