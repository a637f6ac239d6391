"""The demo model at full seats: the process never takes more than was measured and planned.

A part of `--every-combination`.
"""

from __future__ import annotations

import gc

import pytest

from common.ids import AttemptId
from common.kv.memory_plan import DeviceMemory
from common.kv.token_budget import get_max_chunk_tokens
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from common.settings.config import EngineConfig, ModelConfig, SchedulingConfig, SpeculationConfig
from engine.runner.memory_meter import HostMeter
from engine.runner.start.load import load_model_runner
from pdserve.checkpoints.demo_model import demo_model_folder
from pdserve.checkpoints.speculative_model import resolve_speculation
from tests.support.engine.choices import FREE_METHODS
from tests.support.models.pressure import BLOCK_SIZE, Node, answer_together

NUM_SEATS = 8
NUM_DRAFTS = 3
POOL_BLOCKS = 60
KV_BYTES = 128 << 20
BUDGET = 512
OBJECTS_BYTES = 12 << 20
"""Objects of the interpreter. The buffers of a step of BUDGET tokens take 20 MiB."""


class Host(HostMeter):
    """This process on a host with KV_BYTES more than the largest step takes."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.peak_bytes() + KV_BYTES, "the memory of this test", 1.0)


def requests() -> list[GenerationRequest]:
    """More than there are seats, drawn in every way; half of them repeat themselves."""
    ways = (
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(
            max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, top_k=50, top_p=0.9,
            repetition_penalty=1.05, logprobs=2,
        ),
    )  # fmt: skip
    prompts = [[100 + index, *range(1000, 1000 + 11)] * 8 for index in range(2 * NUM_SEATS)]
    return [
        GenerationRequest(
            id=AttemptId(f"r{index}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=ways[index % 2],
            deadline_s=60.0,
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.covers("F107")
@pytest.mark.parametrize("has_local_prefill", [True, False], ids=["local", "small steps"])
@pytest.mark.parametrize("method", FREE_METHODS)
def test_no_more_memory_than_planned(method: str, has_local_prefill: bool) -> None:
    drafts = 0 if method == "none" else NUM_DRAFTS
    speculation = SpeculationConfig(speculative_method=method, num_speculative_tokens=drafts)
    most = get_max_chunk_tokens(
        Role.DECODE,
        max_num_seqs=NUM_SEATS,
        max_num_batched_tokens=BUDGET,
        tokens_per_seq=1 + drafts,
        has_local_prefill=has_local_prefill,
    )
    meter, folder = Host(), demo_model_folder()
    gc.collect()
    runner = load_model_runner(
        ModelConfig(model=str(folder)),
        EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=NUM_SEATS),
        speculation=resolve_speculation(speculation, folder),
        max_chunk_tokens=most,
        meter=meter,
    )
    plan = runner.memory
    assert plan is not None
    runner.warm_up()
    node = Node(
        runner,
        num_blocks=POOL_BLOCKS,
        config=SchedulingConfig(reservation_policy="none"),
        speculation=speculation,
        num_seats=NUM_SEATS,
        budget=most,
    )
    assert runner.num_blocks > POOL_BLOCKS
    meter.reset_peak()
    answer_together(node, requests())
    # `Node` has written the whole cache, so all of the plan is in use.
    taken = meter.peak_bytes() - plan.kv_bytes
    assert plan.peak_bytes // 2 < taken <= plan.peak_bytes + OBJECTS_BYTES
    assert node.largest_step == most
    assert (node.scheduler.statistics().counters.num_drafted > 0) == (method != "none")
