"""What a node shows: each metric once, the numbers of its scheduler, over HTTP; and its log."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.errors import ConfigError
from common.nodes import Role
from common.observing.histogram import HistogramView
from engine.core.blocks.block_pool import BlockCounts
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.runner_contract import OnLayer, OnQueued, RunnerResult, ScheduledSequence
from engine.core.statistics import DiskSize, SchedulerStatistics, StepCounters
from node.flow.messages import NodeStatistics
from node.flow.step_progress import StepProgress
from node.watch.grammar_metrics import GrammarCollector
from node.watch.metrics import NodeCollector, SavedPrefillCollector
from tests.support.engine.build import make_request
from tests.support.engine.hash_runner import expected_tokens
from tests.support.nodes.running_node import WAIT_S, node_config, running_node
from tests.support.observing.samples import samples

STATISTICS = NodeStatistics(
    num_transfers=40,
    scheduler=SchedulerStatistics(
        counters=StepCounters(
            num_growth_blocks=7,
            last_step_tokens=50,
            num_steps=13,
            num_decode_tokens=14,
            num_draft_tokens=15,
            num_chunk_tokens=16,
            num_recomputed_tokens=17,
            num_swapped_out=18,
            num_prefix_blocks_out=33,
            num_prefix_blocks_in=34,
            prefix_blocks_found={"pool": 35, "host": 36, "disk": 47},
            prefix_blocks_sent={"pool": 77, "host": 78, "disk": 79},
            num_drafted=19,
            num_accepted=12,
            num_speculative_steps=8,
            preemptions={"blocks": 20, "priority": 21},
            stops={"barrier": 22, "nothing_waits": 23},
            plans_ahead={"taken": 27, "drafts": 28},
            disk={"written": 50, "late": 51},
            pulls={"landed": 41, "failed": 42},
            num_pulled_tokens=43,
            num_fetched_tokens=17,
            prompt_steps_s=53.5,
            decode_steps_s=54.5,
        ),
        method="suffix",
        blocks=BlockCounts(free=1, cached=2, running=3, reserved=4, receiving=5, quarantined=24),
        num_host_blocks_used=6,
        num_prefix_host_blocks=7,
        disk=DiskSize(48, 49, 52),
        new_token_ratio=0.75,
        num_running=8,
        num_waiting=9,
        num_queued_tokens=25,
        highest_num_bypassed=10,
        max_num_seqs=16,
        max_num_batched_tokens=200,
    ),
)

GRAMMARS = GrammarStatistics(
    compile_s={"regex": HistogramView((0.1, 0.5), (1, 2, 3), 4.5)},
    lookups={"cached": 29, "compiled": 30, "refused": 31},
    num_cached=32,
    cached_bytes=33,
    num_masks=34,
    masks_s=0.35,
    waited_s=0.36,
    num_forced_drafted=37,
    num_forced_accepted=36,
    failures={"compile": 38, "follow": 39},
)

SHOWN_OF_GRAMMARS = {
    'pdserve_grammar_compile_seconds_bucket{kind="regex",le="0.1"}': 1,
    'pdserve_grammar_compile_seconds_bucket{kind="regex",le="0.5"}': 3,
    'pdserve_grammar_compile_seconds_bucket{kind="regex",le="+Inf"}': 6,
    'pdserve_grammar_compile_seconds_count{kind="regex"}': 6,
    'pdserve_grammar_compile_seconds_sum{kind="regex"}': 4.5,
    'pdserve_grammar_lookups_total{result="cached"}': 29,
    'pdserve_grammar_lookups_total{result="compiled"}': 30,
    'pdserve_grammar_lookups_total{result="refused"}': 31,
    "pdserve_grammars_cached": 32,
    "pdserve_grammars_cached_bytes": 33,
    "pdserve_grammar_masks_total": 34,
    "pdserve_grammar_masks_seconds_total": 0.35,
    "pdserve_grammar_masks_wait_seconds_total": 0.36,
    "pdserve_grammar_forced_draft_tokens_total": 37,
    "pdserve_grammar_forced_accepted_tokens_total": 36,
    'pdserve_grammar_failures_total{kind="compile"}': 38,
    'pdserve_grammar_failures_total{kind="follow"}': 39,
}

SHOWN = {
    "pdserve_seconds_without_progress": 0.75,
    "pdserve_seconds_without_progress_limit": 8,
    'pdserve_kv_blocks{state="free"}': 1,
    'pdserve_kv_blocks{state="cached"}': 2,
    'pdserve_kv_blocks{state="running"}': 3,
    'pdserve_kv_blocks{state="reserved"}': 4,
    'pdserve_kv_blocks{state="receiving"}': 5,
    'pdserve_kv_blocks{state="quarantined"}': 24,
    "pdserve_swapped_blocks": 6,
    "pdserve_prefix_host_blocks": 7,
    'pdserve_prefix_blocks_copied_total{direction="out"}': 33,
    'pdserve_prefix_blocks_copied_total{direction="in"}': 34,
    'pdserve_prefix_blocks_sent_total{tier="pool"}': 77,
    'pdserve_prefix_blocks_sent_total{tier="host"}': 78,
    'pdserve_prefix_blocks_sent_total{tier="disk"}': 79,
    'pdserve_prefix_blocks_found_total{tier="pool"}': 35,
    'pdserve_prefix_blocks_found_total{tier="host"}': 36,
    'pdserve_prefix_blocks_found_total{tier="disk"}': 47,
    'pdserve_prefix_disk_events_total{event="written"}': 50,
    'pdserve_prefix_disk_events_total{event="late"}': 51,
    'pdserve_prefix_disk_blocks{node="this"}': 48,
    'pdserve_prefix_disk_blocks{node="others"}': 52,
    "pdserve_prefix_disk_bytes": 49,
    "pdserve_swapped_out_blocks_total": 18,
    "pdserve_growth_blocks": 7,
    "pdserve_new_token_ratio": 0.75,
    "pdserve_running_sequences": 8,
    "pdserve_waiting_sequences": 9,
    "pdserve_seats": 16,
    "pdserve_seats_used_ratio": 0.5,
    "pdserve_kv_blocks_used_ratio": 36 / 39,
    "pdserve_queued_prompt_tokens": 25,
    "pdserve_open_transfers": 40,
    "pdserve_head_passed_sequences": 10,
    'pdserve_refusals_total{reason="overloaded"}': 24,
    'pdserve_admission_stops_total{rule="barrier"}': 22,
    'pdserve_admission_stops_total{rule="nothing_waits"}': 23,
    'pdserve_plans_ahead_total{rule="taken"}': 27,
    'pdserve_plans_ahead_total{rule="drafts"}': 28,
    "pdserve_steps_total": 13,
    'pdserve_step_tokens_total{kind="decode"}': 14,
    'pdserve_step_tokens_total{kind="draft"}': 15,
    'pdserve_step_tokens_total{kind="chunk"}': 16,
    'pdserve_step_seconds_total{computes="prompts"}': 53.5,
    'pdserve_step_seconds_total{computes="decodes"}': 54.5,
    "pdserve_last_step_tokens": 50,
    "pdserve_step_budget_tokens": 200,
    "pdserve_step_budget_used_ratio": 0.25,
    'pdserve_preemptions_total{reason="blocks"}': 20,
    'pdserve_preemptions_total{reason="priority"}': 21,
    "pdserve_recomputed_tokens_total": 17,
    'pdserve_prefix_pulls_total{outcome="landed"}': 41,
    'pdserve_prefix_pulls_total{outcome="failed"}': 42,
    "pdserve_prefix_pulled_tokens_total": 43,
    "pdserve_prefix_fetched_tokens_total": 17,
    'pdserve_draft_tokens_total{method="suffix"}': 19,
    'pdserve_accepted_tokens_total{method="suffix"}': 12,
    'pdserve_speculative_steps_total{method="suffix"}': 8,
    'pdserve_acceptance_length_tokens{method="suffix"}': 2.5,
}


async def scraped(address: str, path: str = "/metrics") -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.get(f"http://{address}{path}")


def test_grammars_have_their_samples() -> None:
    for statistics, shown in ((GRAMMARS, SHOWN_OF_GRAMMARS), (None, {})):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(GrammarCollector(lambda: statistics))  # noqa: B023
        assert samples(generate_latest(registry).decode()) == shown


@pytest.mark.covers("S58")
def test_every_statistic_has_its_sample() -> None:
    registry = CollectorRegistry(auto_describe=False)
    progress = StepProgress(2.0)
    for _ in range(4):
        progress.look(1.0)
    registry.register(NodeCollector(lambda: STATISTICS, {"overloaded": 24}, progress))
    assert samples(generate_latest(registry).decode()) == SHOWN


@pytest.mark.covers("S58")
async def test_a_node_is_scraped_over_http() -> None:
    """What the node counted is what its router was told."""
    async with running_node(node_config(method="mtp")) as node:
        request = make_request(100, max_tokens=40, ignore_eos=True)
        before = samples((await scraped(node.record.metrics_address)).text)
        outputs = await node.answer(request)
        reply = await scraped(node.record.metrics_address)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == expected_tokens(request.prompt_token_ids, request.sampling)
    found = samples(reply.text)
    assert before['pdserve_step_tokens_total{kind="chunk"}'] == 0
    assert found['pdserve_step_tokens_total{kind="chunk"}'] == 100
    _, num_drafted, num_accepted = [o.counts for o in outputs if o.counts is not None][-1]
    assert num_accepted > 0
    assert found['pdserve_draft_tokens_total{method="mtp"}'] == num_drafted
    assert found['pdserve_accepted_tokens_total{method="mtp"}'] == num_accepted
    # Token 0 comes with the prompt's last chunk, every other step draws one of the model's own.
    num_steps = len(node.runner.batches)
    assert found["pdserve_steps_total"] == num_steps
    assert found['pdserve_step_tokens_total{kind="decode"}'] == num_steps - 1
    assert num_accepted + num_steps == 40
    # Its model has memory of its own, so steps are planned ahead where no drafts prevent it.
    assert found['pdserve_plans_ahead_total{rule="drafts"}'] > 0
    assert found["pdserve_running_sequences"] == 0
    assert found['pdserve_refusals_total{reason="overloaded"}'] == 0
    assert sum(v for k, v in found.items() if k.startswith("pdserve_kv_blocks")) == 16


async def test_a_step_that_takes_long_keeps_nobody_from_reading_metrics() -> None:
    async with running_node(node_config()) as node:
        arrived, let_go = threading.Event(), threading.Event()
        execute = node.runner.execute

        def execute_late(
            batch: Sequence[ScheduledSequence],
            on_layer: OnLayer | None = None,
            on_queued: OnQueued | None = None,
        ) -> RunnerResult:
            arrived.set()
            assert let_go.wait(WAIT_S)
            return execute(batch, on_layer, on_queued)

        node.runner.execute = execute_late  # type: ignore[method-assign]
        answering = asyncio.create_task(node.answer(make_request(5, max_tokens=2)))
        assert await asyncio.to_thread(arrived.wait, WAIT_S)
        try:
            found = samples((await scraped(node.record.metrics_address)).text)
        finally:
            let_go.set()
        assert found["pdserve_running_sequences"] == 1
        assert found["pdserve_last_step_tokens"] == 5
        await answering


async def test_the_record_says_where_and_what() -> None:
    async with running_node(node_config(Role.DECODE, method="ngram")) as node:
        record = node.record
        assert record.metrics_address.startswith("127.0.0.1:")
        assert record.metrics_address != record.control_address
        assert record.speculative_method == "ngram"
        assert record.kv_description.endswith("without mtp")
        assert (await scraped(record.metrics_address, "/")).status_code == 404
        shown = samples((await scraped(record.metrics_address)).text)
        assert record.kv_cache_bytes == shown['pdserve_memory_bytes{part="kv_cache"}'] > 0


@pytest.mark.parametrize(
    ("role", "method", "said"),
    [
        (Role.DECODE, "mtp", "16 blocks, sequences of up to 1024 tokens, at most 5 drafts by mtp"),
        # It can become a decode node.
        (Role.PREFILL, "ngram", "1024 tokens, at most 8 drafts by ngram"),
        (Role.MIXED, "none", "1024 tokens, no drafts"),
    ],
)
async def test_the_log_says_what_was_loaded(
    role: Role, method: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="pdserve.node"):
        async with running_node(node_config(role, method=method)):
            assert any(said in message for message in caplog.messages), caplog.messages


async def test_a_chosen_port_is_taken_and_one_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port: int = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics on 127.0.0.1:{port}: .*in use"):
            async with running_node(node_config(metrics_port=port)):
                pass
    async with running_node(node_config(metrics_port=port)) as node:
        assert node.record.metrics_address == f"127.0.0.1:{port}"


def test_what_tiers_saved_is_counted_in_seconds_of_computing() -> None:
    registry = CollectorRegistry()
    registry.register(SavedPrefillCollector(lambda: STATISTICS, block_size=16, token_s=0.5))
    found = STATISTICS.scheduler.counters.prefix_blocks_found
    assert found["host"] > 0
    for tier, num_blocks in found.items():
        shown = registry.get_sample_value("pdserve_prefix_saved_seconds_total", {"tier": tier})
        assert shown == 8 * num_blocks
