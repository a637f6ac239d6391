"""A node's runner on the card: the same bits through real steps, copies, and what a step takes."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from tests.gpu.stages.model import CONTEXT, QWEN3_8B, Checks, Findings

if TYPE_CHECKING:
    from engine.core.runner_contract import ScheduledSequence
    from engine.core.speculation.speculation import Speculation
    from engine.runner.model_runner import ModelRunner

BLOCK_SIZE = 64
SMALL = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4000,
}  # fmt: skip
"""A group of seven heads, which does not divide a tile."""
LARGE = {
    "hidden_size": QWEN3_8B.hidden_size, "intermediate_size": QWEN3_8B.intermediate_size,
    "num_hidden_layers": QWEN3_8B.num_layers, "num_attention_heads": QWEN3_8B.num_heads,
    "num_key_value_heads": QWEN3_8B.num_kv_heads, "head_dim": QWEN3_8B.head_dim,
    "vocab_size": QWEN3_8B.vocab_size,
}  # fmt: skip
_DRAFTS: dict[str, Any] = {"speculative_method": "suffix", "num_speculative_tokens": 3}
_BY_TEMPERATURE: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}]
_OF_ALL_KINDS = [
    *_BY_TEMPERATURE, {"temperature": 0.8, "top_k": 50, "logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": 0.5},
]  # fmt: skip


def runner_bits(card: Any, found: Findings) -> None:
    """Chunks cut anywhere, rows among others, drafts, draws, and blocks that went to another."""
    if not card.is_real:
        return
    _check_bits(loaded(SMALL, 2048), loaded(SMALL, 2048), found)


def runner_bytes(card: Any, found: Findings) -> None:
    """The same over keys and values in int8."""
    if not card.is_real:
        return
    runner, other = (loaded(SMALL, 2048, stored="int8") for _ in range(2))
    _check_bits(runner, other, found)


def _check_bits(runner: ModelRunner, other: ModelRunner, found: Findings) -> None:
    from engine.core.step.step_batch import batch_of
    from tests.support.engine.moved_blocks import move_blocks
    from tests.support.models.running import host_draw, logits_of, scheduled

    prompt = np.random.default_rng(3).integers(0, 4000, 700).tolist()
    table = list(range(20, 31))

    def computed(cuts: Sequence[int]) -> np.ndarray:
        start = 0
        for end in (*cuts, len(prompt)):
            [last] = logits_of(runner, scheduled(prompt[start:end], start, table))
            start = end
        return last

    checks, whole = Checks(), computed([])
    with checks.check("finite logits"):
        assert np.isfinite(whole).all()
    for cuts in ([1], [64, 364], list(range(690, 700)), [256, 257, 699]):
        with checks.check(f"cut at {cuts}"):
            assert np.array_equal(computed(cuts), whole)
    mine = scheduled(prompt[699:], 699, table)
    others = [scheduled(prompt[:count], 0, [place]) for place, count in enumerate((1, 7, 60, 1, 1))]
    for place in range(len(others) + 1):
        batch = [*others[:place], mine, *others[place:]]
        with checks.check(f"among others, {place}"):
            assert np.array_equal(logits_of(runner, *batch)[place], whole)
    with checks.check("drafts"):
        check_drafts(runner, prompt, table)
    told: list[int] = []
    runner.execute(batch_of([scheduled(prompt[:699], 0, table, is_sampled=False)]), told.append)
    moved = list(range(11))
    move_blocks(runner.card_pool, other.card_pool, runner.layout, table, moved)
    [there] = logits_of(other, scheduled(prompt[699:], 699, moved))
    with checks.check("another cache"):
        assert told == list(range(4)), told
        assert np.array_equal(there, whole)
    steps = [_drawing(prompt, table, seed) for seed in range(16)]
    on_card = [runner.execute(batch_of([step])) for step in steps]
    runner._row_draw = host_draw(runner)
    on_host = [runner.execute(batch_of([step])) for step in steps]
    with checks.check("draws"):
        assert on_card == on_host, (on_card, on_host)
    with checks.check("steps that are begun ahead"):
        check_going_on(other, [100 + 37 * place for place in range(12)], 150)
    begun = time.monotonic()
    other.warm_up()
    found["runner_step_costs"] = [other.step_costs.rows, other.step_costs.step_s]
    print(f"warm-up {time.monotonic() - begun:.1f} s: {found['runner_step_costs']}", flush=True)
    checks.end()


def check_drafts(runner: ModelRunner, prompt: Sequence[int], table: Sequence[int]) -> None:
    """The logits of the prompt's last four tokens: one by one, and three as drafts, by graphs.

    The tokens before are in the cache.
    """
    from engine.core.runner_contract import SampleInput, ScheduledSequence
    from tests.support.models.running import GREEDY, logits_of, scheduled

    count, drafted = _DRAFTS["num_speculative_tokens"], SampleInput(GREEDY, 0, [], [])
    start = len(prompt) - count - 1
    alone = [
        logits_of(runner, scheduled([token], start + place, table))[0]
        for place, token in enumerate(prompt[start:])
    ]
    verified = ScheduledSequence(0, prompt[start:], start, table, drafted, num_drafts=count)
    other = scheduled(prompt[:1], 0, [0])  # with rows of padding
    for batch in ([verified], [other, verified], [verified, other]):
        with watched_graphs() as rows_each:
            found = logits_of(runner, *batch)
        first = batch.index(verified)
        assert rows_each == [count + 1], f"graphs of {rows_each} rows a sequence"
        assert np.array_equal(found[first : first + count + 1], alone), "other logits as drafts"


@contextmanager
def watched_graphs() -> Iterator[list[int]]:
    """Give the number of rows a sequence of each graph that is launched."""
    from engine.runner.gpu.steps.decode_step import DecodeSteps
    from engine.runner.gpu.steps.step_rows import StepRows

    rows_each: list[int] = []
    plain_launch = DecodeSteps.launch

    def launch(steps: DecodeSteps, rows: StepRows) -> None:
        rows_each.append(rows.rows_each)
        plain_launch(steps, rows)

    with patch.object(DecodeSteps, "launch", launch):
        yield rows_each


def check_going_on(runner: ModelRunner, lengths: Sequence[int], num_tokens: int) -> None:
    """Rows of any kind that end in the middle: the same tokens, begun ahead or not.

    So they are on a node that verifies drafts between the steps that are begun, by graphs.
    """
    from engine.core import step_after

    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, runner.vocab_size, length).tolist() for length in lengths]
    for ways in (_BY_TEMPERATURE, _OF_ALL_KINDS):
        alone, _ = _decoded(runner, prompts, num_tokens, goes_on=False, ways=ways)
        ahead, times = _decoded(runner, prompts, num_tokens, goes_on=True, ways=ways)
        assert ahead == alone, "other tokens when steps are begun ahead"
        assert len(times) > 2 * num_tokens / 3
        drafting, begun = _drafting(1.0, 8.0), []
        for _ in range(2):  # the second time, drafts are what was drawn the first time
            with patch.object(step_after, "STEPS_WITHOUT_DRAFTS", 1), watched_graphs() as rows_each:
                drafted, times = _decoded(
                    runner, prompts, num_tokens, goes_on=True, ways=ways, speculation=drafting
                )
            assert drafted == alone, "other tokens when steps are begun ahead between drafts"
            begun.append(len(times))
        assert 0 < begun[1] < begun[0], begun
        assert max(rows_each) > 1, "no step that verifies drafts was a graph"


def _drafting(one_row: float, many_rows: float) -> Speculation:
    """Return a node's drafting, where steps of 1 and of 64 rows take so long."""
    from common.settings.config import SpeculationConfig
    from engine.core.runner_contract import StepCosts
    from engine.core.speculation.speculation import make_speculation

    config = SpeculationConfig(**_DRAFTS)
    speculation = make_speculation(config, StepCosts((1, 64), (one_row, many_rows)))
    assert speculation is not None
    return speculation


def runner_steps(card: Any, found: Findings) -> None:
    """What `execute` takes with an 8B model: from the host's batch to the host's tokens."""
    if not card.is_real:
        return
    begun = time.monotonic()
    runner = loaded(LARGE, 4096)
    found["runner_load_s"] = round(time.monotonic() - begun, 1)
    print(f"loaded in {found['runner_load_s']} s", flush=True)
    _time_steps(runner, found)


def _time_steps(runner: ModelRunner, found: Findings) -> None:
    from common.request import SamplingParams
    from engine.core.runner_contract import SampleInput, ScheduledSequence
    from engine.core.step.step_batch import batch_of

    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    history = [7] * 4096
    for count in (1, 8, 32, 64, 128):
        per_seq = CONTEXT // BLOCK_SIZE + 1
        batch = batch_of(
            [
                ScheduledSequence(
                    0, [5], CONTEXT - 1, range(place * per_seq, (place + 1) * per_seq),
                    SampleInput(greedy, 0, history[:CONTEXT], []),
                )
                for place in range(count)
            ]
        )  # fmt: skip
        found[f"runner_step_{count}_ms"] = median_ms(runner, batch, 20)
        print(count, "sequences:", found[f"runner_step_{count}_ms"], "ms", flush=True)
    num_drafts = _DRAFTS["num_speculative_tokens"]
    for count in (1, 8, 32, 64):
        per_seq = CONTEXT // BLOCK_SIZE + 1
        drafted = [
            ScheduledSequence(
                0, history[: num_drafts + 1], CONTEXT - num_drafts - 1,
                range(place * per_seq, (place + 1) * per_seq),
                SampleInput(greedy, 0, history[: CONTEXT - num_drafts], []), num_drafts=num_drafts,
            )
            for place in range(count)
        ]  # fmt: skip
        found[f"runner_verified_{count}_ms"] = median_ms(runner, drafted, 20)
        print(
            f"{count} sequences of {num_drafts} drafts: {found[f'runner_verified_{count}_ms']} ms",
            flush=True,
        )
    for count in (1, 8, 32, 64, 128):
        prompts = np.random.default_rng(count).integers(0, 1000, (count, CONTEXT - 30)).tolist()
        for label, goes_on, ways, speculation in (
            ("planned", False, _BY_TEMPERATURE, None), ("begun", True, _BY_TEMPERATURE, None),
            ("begun_of_all_kinds", True, _OF_ALL_KINDS, None),
            ("begun_where_no_draft_pays", True, _BY_TEMPERATURE, _drafting(1.0, 64.0)),
        ):  # fmt: skip
            _, times = _decoded(
                runner, prompts, 60, goes_on=goes_on, is_even=True, ways=ways,
                speculation=speculation,
            )  # fmt: skip
            key = f"runner_{label}_{count}_ms"
            found[key] = round(1e3 * statistics.median(np.diff(times)), 3)
            print(count, f"sequences, steps {label} ahead:", found[key], "ms", flush=True)
    for length in (512, 4096):
        sample = SampleInput(greedy, 0, history[:length], [])
        chunk = ScheduledSequence(0, history[:length], 0, range(length // BLOCK_SIZE), sample)
        found[f"runner_prefill_{length}_ms"] = median_ms(runner, [chunk], 5)
        found[f"runner_exported_{length}_ms"] = median_ms(runner, [chunk], 5, lambda _: None)
        print(
            f"prefill of {length}: {found[f'runner_prefill_{length}_ms']} ms; with each layer "
            f"told {found[f'runner_exported_{length}_ms']} ms", flush=True,
        )  # fmt: skip


def _decoded(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int, *, goes_on: bool,
    is_even: bool = False, ways: Sequence[dict[str, Any]] = _BY_TEMPERATURE,
    speculation: Speculation | None = None,
) -> tuple[list[list[int]], list[float]]:  # fmt: skip
    """Answer prompts as a node does; return the outputs, and when each step's tokens were there.

    They are drawn in these ways in turn. Times are those of plain steps, or of those that were
    begun ahead. With `is_even` all outputs are as long, and else each one differs.
    """
    from engine.core.planner_contract import StepLimits
    from engine.core.scheduler import Scheduler
    from engine.core.sequences.sequence import Sequence as Answer
    from tests.support.engine.build import make_request

    scheduler = Scheduler(
        limits=StepLimits(
            max_num_seqs=len(prompts), max_num_batched_tokens=runner.max_model_len,
            block_size=runner.layout.block_size, max_model_len=runner.max_model_len,
            num_speculative_tokens=0 if speculation is None else speculation.num_speculative_tokens,
        ),
        speculation=speculation,
        num_blocks=runner.num_blocks, fingerprint=runner.layout.fingerprint,
        eos_token_ids=frozenset(), enable_prefix_caching=False, can_go_on=goes_on,
    )  # fmt: skip
    outputs: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        length = num_tokens if is_even else num_tokens - num_tokens * place // 16
        request = make_request(
            tuple(prompt), seed=place, max_tokens=length, **ways[place % len(ways)]
        )
        outputs[place] = []
        scheduler.add(Answer(place, request))
    times = []
    while scheduler.running or scheduler.waiting:
        step = scheduler.plan()
        results = runner.execute(step.batch)
        if step.batch.is_plain and (step.batch.continues is not None) == goes_on:
            times.append(time.monotonic())
        scheduler.plan_ahead(step)
        for output in scheduler.apply(step, results):
            outputs[output.sequence.sequence_id] += output.token_ids
    return list(outputs.values()), times


def median_ms(
    runner: ModelRunner, batch: Sequence[ScheduledSequence], repeats: int,
    on_layer: Callable[[int], None] | None = None,
) -> float:  # fmt: skip
    """Return what `execute` takes."""
    from engine.core.step.step_batch import batch_of

    taken = []
    for _ in range(repeats):
        step = batch_of(batch)
        begun = time.monotonic()
        runner.execute(step, on_layer)
        taken.append(time.monotonic() - begun)
    return round(1e3 * statistics.median(taken), 3)


def _drawing(prompt: Sequence[int], table: Sequence[int], seed: int) -> Any:
    from common.request import SamplingParams
    from engine.core.runner_contract import SampleInput, ScheduledSequence

    way = SamplingParams(max_tokens=1, temperature=float(seed > 0), seed=seed)
    return ScheduledSequence(0, prompt[699:], 699, table, SampleInput(way, 0, list(prompt), []))


def loaded(
    shape: dict[str, int], max_len: int, quantization: str = "none", stored: str = "auto"
) -> ModelRunner:
    """Return a runner of a node that drafts, with random weights, quantised if they are to be.

    Keys and values are `stored` as `kv_cache_dtype` says.

    It keeps its memory until the process ends: of the large ones a card has room for two.
    """
    from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
    from engine.runner.start.load import load_model_runner

    config = {
        "architectures": ["Qwen2ForCausalLM" if shape is SMALL else "Qwen3ForCausalLM"],
        "model_type": "qwen2" if shape is SMALL else "qwen3", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": 2, **shape,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        return load_model_runner(
            ModelConfig(model=name, load_format="random", max_model_len=max_len,
                        quantization=quantization),
            EngineConfig(
                attention_backend="triton", max_num_seqs=128, kv_cache_dtype=stored,
                kv_cache_memory=24 << 30 if shape is LARGE else 1 << 28,
                max_num_batched_tokens=4096, block_size=BLOCK_SIZE,
            ),
            speculation=SpeculationConfig(**_DRAFTS),
        )  # fmt: skip
