"""A cluster that drafts, as people see it: usage, metrics of nodes, status, a pair that is none."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nodes import Role
from pdserve.commands.cluster_status import fetch_cluster
from pdserve.commands.status_table import status_table
from router.core.ttft_stages import Stage
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import prompt_tokens

REQUESTS: list[Fields] = [
    {"prompt": prompt_tokens(30, salt=71) * 2, "max_tokens": 60, "temperature": t, "seed": 5}
    for t in (0, 0.7)
]


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ClusterSpec:
    """A decode node that looks drafts up, and a second prefill node that cuts other blocks."""
    return ClusterSpec(
        name="outside",
        model=tiny_model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("prefill-odd", Role.PREFILL, ("--block-size", "32")),
            NodeSpec(
                "decode-1",
                Role.DECODE,
                ("--local-prefill-threshold", "0", "--speculative-method", "ngram"),
            ),
        ),
        flags=SMALL_NODES,
        has_patient_routers=True,
    )


def metrics_of(cluster: Cluster, node_id: str) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, from where the node's record says."""
    nodes = httpx.get(f"{cluster.url}/v1/cluster").json()["nodes"]
    (address,) = [n["metrics_address"] for n in nodes if n["node_id"] == node_id]
    return samples_of(httpx.get(f"http://{address}/metrics").text)


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("fields", REQUESTS)
def test_drafts_change_no_answer_and_are_in_the_usage(
    cluster: Cluster, api: Api, tiny_api: Api, fields: Fields
) -> None:
    answer = api.complete(logprobs=0, ignore_eos=True, **fields)
    plain = tiny_api.complete(logprobs=0, ignore_eos=True, **fields)
    assert answer == plain
    with api.stream(
        ignore_eos=True, logprobs=0, stream_options={"include_usage": True}, **fields
    ) as stream:
        streamed = stream.read_rest()
    assert streamed == plain
    details = answer.usage["completion_tokens_details"]
    assert plain.usage["completion_tokens_details"] == dict.fromkeys(details, 0)
    if fields["temperature"] == 0:
        # The tiny model soon repeats itself.
        assert details["accepted_prediction_tokens"] > 0
        assert streamed.usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_what_the_nodes_counted_is_what_the_router_was_told(cluster: Cluster, api: Api) -> None:
    before = metrics_of(cluster, "decode-1")
    usage = api.complete(ignore_eos=True, **REQUESTS[0]).usage["completion_tokens_details"]
    cluster.check_settled()
    after = metrics_of(cluster, "decode-1")

    def grown(*sample: str) -> float:
        return after[sample] - before[sample]

    assert grown("pdserve_accepted_tokens_total", "ngram") == usage["accepted_prediction_tokens"]
    assert grown("pdserve_draft_tokens_total", "ngram") == sum(usage.values())
    assert grown("pdserve_step_tokens_total", "draft") == sum(usage.values())
    assert 59 - grown("pdserve_step_tokens_total", "decode") == usage["accepted_prediction_tokens"]
    prefill = metrics_of(cluster, "prefill-1")
    assert prefill["pdserve_step_tokens_total", "chunk"] >= 60
    assert prefill["pdserve_step_tokens_total", "decode"] == 0
    router = httpx.get(f"{cluster.url}/metrics").text
    assert "pdserve_accepted_prediction_tokens_total" in router


def test_the_stages_of_ttft_add_up_to_it(cluster: Cluster, api: Api) -> None:
    # One is handed off, one ends with its first token on a prefill node, one has two choices.
    api.complete(ignore_eos=True, **REQUESTS[0])
    api.complete(prompt=prompt_tokens(40, salt=73), max_tokens=1)
    api.complete(prompt=prompt_tokens(40, salt=74), max_tokens=3, n=2)
    router = samples_of(httpx.get(f"{cluster.url}/metrics").text)
    stages = {
        key[1]: value for key, value in router.items() if key[0] == "pdserve_ttft_stage_seconds_sum"
    }
    assert set(stages) == {stage.value for stage in Stage}
    ttft_s = router[("pdserve_time_to_first_token_seconds_sum",)]
    assert abs(sum(stages.values()) - ttft_s) < 1e-6
    num_timed = router[("pdserve_time_to_first_token_seconds_count",)]
    assert num_timed >= 4
    for stage in stages:
        assert router["pdserve_ttft_stage_seconds_count", stage] == num_timed
    for stage in ("edge", "reserve", "prefill_queue", "prefill_compute", "delivery"):
        assert stages[stage] > 0
    # A node that stood still for a moment had a second attempt beside its own.
    assert stages["retries"] == 0 or router[("pdserve_router_retries_total",)] > 0


def test_a_handoff_is_measured_where_it_left_and_where_it_landed(
    cluster: Cluster, api: Api
) -> None:
    api.complete(prompt=prompt_tokens(40, salt=75), max_tokens=3)
    cluster.check_settled()
    sender, receiver = metrics_of(cluster, "prefill-1"), metrics_of(cluster, "decode-1")
    (transport,) = [
        key[-1] for key, value in sender.items() if key[0] == "pdserve_kv_pairs" and value
    ]
    num_sent = sender["pdserve_kv_exposed_seconds_count", transport]
    assert num_sent >= 1
    assert sender["pdserve_kv_transfers_total", "committed", transport] == num_sent
    assert receiver["pdserve_kv_landing_seconds_count", transport] == num_sent
    num_bytes = sender["pdserve_kv_transfer_bytes_sum", transport]
    assert receiver["pdserve_kv_landing_bytes_sum", transport] == num_bytes > 0
    assert receiver["pdserve_kv_quarantined_blocks", transport] == 0

    def pairs() -> list[str]:
        return (
            status_table(fetch_cluster(cluster.url), is_wide=True)
            .partition("KV transfer:\n")[2]
            .split("\n")
        )

    # A heartbeat carries it there.
    wait_until(
        lambda: any(
            row.split() == ["prefill-1", "decode-1", transport, "connected"] for row in pairs()
        ),
        "the status shows the pair",
    )


def test_status_shows_drafts_and_addresses(cluster: Cluster, api: Api) -> None:
    api.complete(ignore_eos=True, **REQUESTS[0])
    counted = cluster.status("decode-1")

    def row() -> list[str]:
        table = status_table(fetch_cluster(cluster.url), is_wide=True).splitlines()
        return [line for line in table if line.startswith("decode-1")][1].split()

    share = f"{counted.num_accepted} of {counted.num_drafted}"
    # A heartbeat carries it there.
    wait_until(lambda: share in " ".join(row()), "the status is up to date")
    assert row()[5] == "ngram"


@pytest.mark.covers("F29", "S57")
def test_a_prefill_node_that_fits_no_decode_node_is_named(cluster: Cluster) -> None:
    # Both sides' values, where people look; prefill-1 pairs with ngram on decode-1.
    cluster.wait_trusted()
    reply = httpx.get(f"{cluster.url}/ready")
    assert reply.status_code == 200
    (warning,) = (one for one in reply.json()["warnings"] if "can hand nothing off" in one)
    assert warning.startswith("prefill-odd can hand nothing off")
    assert "blocks of 32, float32" in warning
    assert "decode-1 (" in warning
    assert "blocks of 16, float32" in warning
    assert "Warning: prefill-odd" in status_table(fetch_cluster(cluster.url), is_wide=True)
