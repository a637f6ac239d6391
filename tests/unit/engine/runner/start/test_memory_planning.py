"""A node's largest step, measured before its cache is allocated, and no later step takes more."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.ids import AttemptId
from common.kv.memory_plan import DeviceMemory
from common.kv.token_budget import get_max_chunk_tokens, tokens_per_seq
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from common.settings.config import EngineConfig, ModelConfig, SchedulingConfig, SpeculationConfig
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.back_end import StepShape
from engine.runner.cache.contract import HostMemory
from engine.runner.flat_batch import BatchLimits
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from engine.runner.start.profile_step import FirstLayers, profile_batches
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.engine.choices import FREE_METHODS
from tests.support.models.mtp_running import TARGETS, write_inside
from tests.support.models.pressure import BLOCK_SIZE, Node
from tests.support.models.running import logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

MIB = 1 << 20
NUM_SEATS = 6
NUM_DRAFTS = 3
BUDGET = 1500
OBJECTS_BYTES = 96 << 10
"""Objects of the interpreter in a step: a row of hidden states for each token would take more."""
NUM_BLOCKS = 45
"""Fewer than all seats require, so that sequences are preempted."""
CONFIG = CONFIGS[TARGETS["deepseek"]]
HEAD_DIM = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]


class FakeMeter:
    """A device of 100 MiB, on which the largest step takes 30; notes what it is asked."""

    def __init__(self, peak_bytes: int = 30 * MIB) -> None:
        self.calls: list[str] = []
        self._peak_bytes = peak_bytes

    def memory(self) -> DeviceMemory:
        self.calls.append("memory")
        return DeviceMemory(100 * MIB, "a small device", 0.5)

    def reset_peak(self) -> None:
        self.calls.append("reset")

    def peak_bytes(self, shared_bytes: int = 0) -> int:
        self.calls.append("peak")
        return self._peak_bytes


def planned(
    folder: Path,
    meter: FakeMeter,
    *,
    method: str = "none",
    max_chunk_tokens: int = 64,
    host_space: int = 0,
    host_memory: HostMemory | None = None,
    **engine: object,
) -> ModelRunner:
    settings: dict[str, object] = {"block_size": BLOCK_SIZE, "attention_backend": "numba"}
    drafts = 0 if method == "none" else NUM_DRAFTS
    return load_model_runner(
        ModelConfig(model=str(folder)),
        EngineConfig(max_num_seqs=NUM_SEATS, **(settings | engine)),  # type: ignore[arg-type]
        speculation=SpeculationConfig(speculative_method=method, num_speculative_tokens=drafts),
        host_space=host_space,
        max_chunk_tokens=max_chunk_tokens,
        host_memory=host_memory,
        meter=meter,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inside(tmp_path_factory.mktemp("llama"), "deepseek")


@pytest.mark.parametrize("backend", ["numba", "paddle"])
def test_the_cache_is_what_the_step_leaves_of_the_share(folder: Path, backend: str) -> None:
    meter = FakeMeter()
    runner = planned(folder, meter, attention_backend=backend)
    assert meter.calls == ["memory", "reset", "peak", "memory"]
    assert runner.num_blocks == 20 * MIB // runner.layout.block_bytes
    assert runner.memory is not None
    assert runner.memory.kv_bytes == runner.num_blocks * runner.layout.block_bytes
    assert (runner.memory.peak_bytes, runner.memory.max_chunk_tokens) == (30 * MIB, 64)
    assert (runner.memory.step_buffer_bytes > 0) == (backend == "numba")
    more = planned(folder, FakeMeter(), attention_backend=backend, memory_fraction=0.8)
    assert more.num_blocks == 50 * MIB // runner.layout.block_bytes


@pytest.mark.parametrize(
    ("dtype", "head_bytes"),
    [("float32", 4 * HEAD_DIM), ("bfloat16", 2 * HEAD_DIM), ("int8", HEAD_DIM + 4)],
)
def test_the_plan_counts_the_bytes_that_are_stored(
    folder: Path, dtype: str, head_bytes: int
) -> None:
    runner = planned(folder, FakeMeter(), kv_cache_dtype=dtype, host_space=MIB)
    layers, heads = CONFIG["num_hidden_layers"], CONFIG["num_key_value_heads"]
    block_bytes = 2 * layers * heads * BLOCK_SIZE * head_bytes
    assert runner.layout.block_bytes == block_bytes
    assert runner.num_blocks == 19 * MIB // block_bytes
    assert runner.num_host_blocks == MIB // block_bytes
    assert runner.memory is not None
    assert runner.memory.kv_bytes == runner.kv_bytes.nbytes == runner.num_blocks * block_bytes


@pytest.mark.parametrize(("kv_cache_memory", "is_touched"), [(0, False), (4 * MIB, True)])
def test_memory_that_others_can_read_is_taken_for_the_cache_alone(
    folder: Path, kv_cache_memory: int, is_touched: bool
) -> None:
    taken: list[tuple[np.ndarray, bool]] = []

    def host_memory(num_bytes: int, is_touched: bool) -> np.ndarray:
        taken.append((np.zeros(num_bytes, np.uint8), is_touched))
        return taken[-1][0]

    runner = planned(folder, FakeMeter(), host_memory=host_memory, kv_cache_memory=kv_cache_memory)
    [(memory, was_touched)] = taken
    assert was_touched == is_touched
    assert np.shares_memory(runner.kv_bytes, memory)
    logits_of(runner, scheduled(prompt_of(20), 0, [3, 4]))
    assert memory.any()


def test_swapped_blocks_are_part_of_the_share(folder: Path) -> None:
    runner = planned(folder, FakeMeter(), host_space=4 * MIB)
    assert runner.num_blocks == 16 * MIB // runner.layout.block_bytes


def test_a_configured_size_is_not_measured(folder: Path) -> None:
    meter = FakeMeter()
    runner = planned(folder, meter, kv_cache_memory=MIB)
    assert meter.calls == ["memory"], "it is only compared"
    assert runner.num_blocks == MIB // runner.layout.block_bytes


def test_more_than_there_is_is_told(folder: Path) -> None:
    """And not a failed allocation, or a process that the system kills."""
    planned(folder, FakeMeter(), kv_cache_memory=99 * MIB, host_space=MIB)
    with pytest.raises(ConfigError, match=r"kv_cache_memory is 1024\.00 GiB: wanted less"):
        planned(folder, FakeMeter(), kv_cache_memory=1 << 40)
    with pytest.raises(ConfigError, match=r"beside 2\.0 MiB of swap_space and prefix_host_memory"):
        planned(folder, FakeMeter(), kv_cache_memory=99 * MIB, host_space=2 * MIB)


def test_too_small_a_share_is_told(folder: Path) -> None:
    meter = FakeMeter(peak_bytes=50 * MIB)
    with pytest.raises(ConfigError, match=r"is 0\.5 by default: 50\.0 MiB of a small device, 100"):
        planned(folder, meter)
    with pytest.raises(ConfigError, match=r"prefix_host_memory 100\.0 MiB.*wanted more memory"):
        planned(folder, FakeMeter(), host_space=100 * MIB)


def test_a_length_that_the_planned_cache_cannot_hold_is_told(folder: Path) -> None:
    block_bytes = planned(folder, FakeMeter()).layout.block_bytes
    few = FakeMeter(peak_bytes=50 * MIB - 4 * block_bytes)
    assert planned(folder, few).max_model_len == 3 * BLOCK_SIZE
    model = ModelConfig(model=str(folder), max_model_len=400)
    engine = EngineConfig(block_size=BLOCK_SIZE)
    with pytest.raises(ConfigError, match="memory_fraction or kv_cache_memory for 26 blocks"):
        load_model_runner(model, engine, max_chunk_tokens=64, meter=few)


def test_a_model_for_any_length_takes_no_more_memory(folder: Path, tmp_path: Path) -> None:
    """Tables have an entry for each position: as many as the share could hold at most."""
    block_bytes = planned(folder, FakeMeter()).layout.block_bytes
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    config = json.loads((endless / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 32
    (endless / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    try:
        runner = planned(endless, FakeMeter())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * MIB
    # One block is kept for a step's further tokens.
    assert runner.max_model_len == (20 * MIB // block_bytes - 1) * BLOCK_SIZE


@pytest.mark.parametrize("backend", ["numba", "paddle"])
@pytest.mark.parametrize("method", ["none", "mtp"])
def test_a_planned_cache_computes_what_a_configured_one_does(
    folder: Path, method: str, backend: str
) -> None:
    ours = planned(folder, FakeMeter(), method=method, attention_backend=backend)
    theirs = planned(
        folder, FakeMeter(), method=method, attention_backend=backend, kv_cache_memory=4 * MIB
    )
    assert ours.layout == theirs.layout
    prompt, table = prompt_of(50), [7, 3, 30, 12]
    for runner in (ours, theirs):
        assert not runner.kv_bytes.any(), "the profile step's KV is not in the cache"
    [mine] = logits_of(ours, scheduled(prompt, 0, table))
    [other] = logits_of(theirs, scheduled(prompt, 0, table))
    np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(ours.kv_bytes[:, :, table], theirs.kv_bytes[:, :, table])


def limits_of(max_tokens: int, max_len: int) -> BatchLimits:
    return BatchLimits(
        max_tokens=max_tokens, max_len=max_len, num_blocks=2, block_size=16, vocab_size=97
    )


@pytest.mark.parametrize("has_longest_context", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "num_drafts", "max_len", "wanted"),
    [
        (24, 6, 3, 512, ([4] * 6, [24])),
        (6, 6, 0, 512, ([1] * 6, [6])),
        (100, 6, 3, 512, ([4, 4, 4, 4, 4, 80], [100])),
        (100, 6, 0, 40, ([1, 1, 1, 17, 40, 40], [40, 40, 20])),
        (3, 6, 3, 512, ([3], [3])),
        (5, 2, 3, 512, ([5], [5])),
        (1000, 2, 0, 40, ([40, 40], [40, 40])),
    ],
)
def test_the_largest_steps(
    num_tokens: int,
    num_seqs: int,
    num_drafts: int,
    max_len: int,
    wanted: tuple[list[int], list[int]],
    has_longest_context: bool,
) -> None:
    shape = StepShape(num_tokens=num_tokens, num_seqs=num_seqs, num_logits_rows=64)
    limits = limits_of(num_tokens, max_len)
    batches = profile_batches(shape, limits, num_drafts, has_longest_context=has_longest_context)
    assert tuple([len(one.token_ids) for one in batch] for batch in batches) == wanted
    decodes, chunks = batches
    assert all(one.start == 0 for one in decodes)
    for one in chunks:
        end = one.start + len(one.token_ids)
        assert end == (max_len if has_longest_context else len(one.token_ids))
    for one in decodes:
        assert one.num_drafts in (0, len(one.token_ids) - 1)
        assert one.num_proposals == num_drafts


class PeakOfSteps:
    """Stands before a runner; notes the most memory that a step of it took for a while."""

    def __init__(self, runner: ModelRunner) -> None:
        self._execute = runner.execute
        self.highest_bytes = 0
        self.largest_step = 0
        self.most_sequences = 0

    def execute(self, batch: StepBatch, *others: Any) -> object:
        self.most_sequences = max(self.most_sequences, len(batch))
        self.largest_step = max(self.largest_step, sum(len(one.token_ids) for one in batch))
        # Only steps are traced: everything else would take three times as long.
        tracemalloc.start()
        try:
            results = self._execute(batch, *others)
            _, highest = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.highest_bytes = max(self.highest_bytes, highest)
        return results


def fill_seats(node: Node, num_requests: int) -> None:
    """Answer requests that repeat themselves, drawn in every way, until none is left."""
    for index in range(num_requests):
        sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        if index % 2:
            sampling = SamplingParams(
                max_tokens=100, temperature=0.9, seed=index, ignore_eos=True, top_k=40, top_p=0.9,
                repetition_penalty=1.05, frequency_penalty=0.1, logprobs=1,
            )  # fmt: skip
        prompt = [index % 90, *prompt_of(9) * (7 + index % 3)]
        node.add(
            GenerationRequest(
                id=AttemptId(f"r{index}", 1),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                deadline_s=60.0,
            )
        )
    for _ in range(2000):
        if not node.is_busy:
            return
        node.step()
    raise AssertionError("the node stalls")


@pytest.mark.parametrize(
    ("method", "has_local_prefill"), [*zip(FREE_METHODS, cycle([False, True]), strict=False)]
)
def test_no_step_takes_more_memory_than_the_largest_one(
    folder: Path, method: str, has_local_prefill: bool
) -> None:
    """Each method with steps of one size; `tests/equality` has both, on the demo model."""
    per_seq = tokens_per_seq(method, NUM_DRAFTS)
    most = get_max_chunk_tokens(
        Role.DECODE,
        max_num_seqs=NUM_SEATS,
        max_num_batched_tokens=BUDGET,
        tokens_per_seq=per_seq,
        has_local_prefill=has_local_prefill,
    )
    runner = planned(folder, FakeMeter(), method=method, max_chunk_tokens=most)
    runner.warm_up()
    assert runner.memory is not None
    shape = StepShape(num_tokens=most, num_seqs=NUM_SEATS, num_logits_rows=64)
    batches = profile_batches(shape, runner.limits, per_seq - 1, has_longest_context=False)

    def new_node() -> Node:
        return Node(
            runner,
            num_blocks=NUM_BLOCKS,
            config=SchedulingConfig(reservation_policy="none"),
            speculation=SpeculationConfig(
                speculative_method=method, num_speculative_tokens=per_seq - 1
            ),
            num_seats=NUM_SEATS,
            budget=most,
        )

    fill_seats(new_node(), 2)  # what is made once, in the first step that needs it
    node, profiled, served = new_node(), PeakOfSteps(runner), PeakOfSteps(runner)
    for batch in batches:
        profiled.execute(batch_of(batch))
    runner.kv_bytes[...] = 0
    runner.execute = served.execute  # type: ignore[method-assign, assignment]
    fill_seats(node, 2 * NUM_SEATS)
    assert served.most_sequences == NUM_SEATS
    assert served.largest_step <= most
    assert served.highest_bytes <= profiled.highest_bytes + OBJECTS_BYTES
    if has_local_prefill:
        # Nothing with a row of floats for each token is made in a step: that is in the buffers.
        row_bytes = CONFIGS["llama"]["hidden_size"] * 4
        assert profiled.highest_bytes < most * row_bytes
    counted = node.scheduler.statistics().counters
    assert (counted.num_drafted > 0) == (method != "none")
    assert counted.num_preemptions > 0


class NotedLayers:
    """A decoder that notes which of its layers run."""

    num_layers = 5

    def __init__(self) -> None:
        self.ran: list[int] = []

    def run_layer(self, index: int, hidden: Any) -> None:
        del hidden
        self.ran.append(index)


@pytest.mark.parametrize(
    ("without", "ran"),
    [([0, 1, 2, 3, 4], [0]), ([], [0]), ([0, 1, 4], [0, 2]), ([2], [0, 2])],
)
def test_the_first_layer_of_each_kind_is_measured(
    tmp_path: Path, without: list[int], ran: list[int]
) -> None:
    """One with experts may take more than one without, and either may be the first."""
    config = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 5, "mlp_only_layers": without}
    assert _layers_that_run(tmp_path, config) == ran


@pytest.mark.parametrize(("family", "ran"), [("qwen3_mixed", [0, 1]), ("mistral_window", [0])])
def test_layers_with_a_window_are_a_kind_of_their_own(
    tmp_path: Path, family: str, ran: list[int]
) -> None:
    """Those without one attend to more positions, and the first layer may be either."""
    assert _layers_that_run(tmp_path, CONFIGS[family]) == ran


def _layers_that_run(folder: Path, config: dict[str, Any]) -> list[int]:
    (folder / "config.json").write_text(json.dumps(config))
    decoder = NotedLayers()
    layers = FirstLayers(decoder, read_decoder_spec(folder), None)  # type: ignore[arg-type]
    for index in range(layers.num_layers):
        layers.run_layer(index, [])
    return decoder.ran


@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "ernie_moe"])
def test_a_mixture_is_planned_beside_its_largest_step(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    meter = FakeMeter()
    runner = planned(folder, meter, attention_backend="paddle")
    assert meter.calls == ["memory", "reset", "peak", "memory"]
    assert runner.num_blocks == 20 * MIB // runner.layout.block_bytes
    [logits] = logits_of(runner, scheduled(prompt_of(33), 0, range(10)))
    assert np.isfinite(logits).all()
