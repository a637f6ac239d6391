"""A cluster with keys on every connection answers like one without, and lives through a renewal."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli import main
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

PROMPT = prompt_tokens(100, salt=81)


def read(path: Path) -> str:
    return path.read_text()


def metrics(cluster: Cluster, node_id: str) -> dict[tuple[str, ...], float]:
    """A node's samples, read as Prometheus would."""
    reply = httpx.get(f"{cluster.url}/v1/cluster", headers=cluster.headers)
    (address,) = [n["metrics_address"] for n in reply.json()["nodes"] if n["node_id"] == node_id]
    return samples(cluster, f"http://{address}/metrics")


def samples(cluster: Cluster, url: str) -> dict[tuple[str, ...], float]:
    assert cluster.spec.keys is not None
    token = read(cluster.spec.keys / "client/metrics.token")
    shown = httpx.get(url, headers={"authorization": f"Bearer {token}"})
    assert shown.status_code == 200, shown.text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(shown.text)
        for sample in family.samples
    }


def test_a_prompt_is_handed_off_and_answered_as_without_keys(
    keyed_cluster: Cluster, keyed_api: Api, tiny_api: Api
) -> None:
    before = metrics(keyed_cluster, "prefill-1")
    answer = keyed_api.complete(PROMPT, max_tokens=12, ignore_eos=True, temperature=0)
    assert answer == tiny_api.complete(PROMPT, max_tokens=12, ignore_eos=True, temperature=0)
    committed = ("pdserve_kv_transfers_total", "committed", "zmq")
    keyed_cluster.check_settled()
    after = metrics(keyed_cluster, "prefill-1")
    assert after[committed] == before[committed] + 1


def test_streams_and_chats_work_with_the_key_that_init_wrote(keyed_api: Api) -> None:
    with keyed_api.stream(prompt=PROMPT, max_tokens=5, ignore_eos=True) as stream:
        assert stream.read_rest().text
    assert keyed_api.chat("hello", max_tokens=3).tokens


def test_status_shows_the_cluster_with_a_key(
    keyed_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keyed_cluster.spec.keys is not None
    key = read(keyed_cluster.spec.keys / "client/api.key")
    assert main(["status", "--url", keyed_cluster.url, "--api-key", key]) == 0
    assert "decode-1" in capsys.readouterr().out
    assert main(["status", "--url", keyed_cluster.url]) == 1


def test_the_routers_metrics_are_open_to_the_token(keyed_cluster: Cluster) -> None:
    assert keyed_cluster.spec.keys is not None
    token = read(keyed_cluster.spec.keys / "client/metrics.token")
    url = f"{keyed_cluster.url}/metrics"
    assert httpx.get(url).status_code == 401
    reply = httpx.get(url, headers={"authorization": f"Bearer {token}"})
    assert reply.status_code == 200
    assert "pdserve_router_choices_total" in reply.text


@pytest.mark.endurance
def test_renewed_certificates_are_taken_over_without_a_restart(
    keyed_cluster: Cluster, keyed_api: Api, keys: Path
) -> None:
    end = ("pdserve_certificate_end_timestamp_seconds",)
    prefill, decode = keyed_cluster.processes["prefill-1"], keyed_cluster.processes["decode-1"]
    url = f"{keyed_cluster.url}/metrics"
    before = samples(keyed_cluster, url)[end], metrics(keyed_cluster, "prefill-1")[end]
    for kind in ("node", "router"):
        assert main(["keys", "renew", str(keys), kind, "--days", "9"]) == 0
    wait_until(lambda: samples(keyed_cluster, url)[end] > before[0], "the router has read it")
    wait_until(
        lambda: metrics(keyed_cluster, "prefill-1")[end] > before[1], "the prefill node has read it"
    )
    # Another life of the decode node is met with the new certificates.
    assert decode.stop() == 0
    keyed_cluster.mend()
    assert prefill.is_running
    assert keyed_api.complete(PROMPT, max_tokens=4, ignore_eos=True).tokens


def test_redis_away_and_back(
    keyed_cluster: Cluster, keyed_api: Api, keyed_redis: RedisServer
) -> None:
    """Connections log in again by themselves."""
    keyed_redis.kill()
    assert keyed_api.complete(PROMPT, max_tokens=2, ignore_eos=True).tokens
    keyed_redis.start()
    wait_until(
        lambda: (
            {n.record.incarnation.node_id for n in keyed_cluster.live_nodes()}
            == {"prefill-1", "decode-1"}
        ),
        "both nodes are back in Redis",
    )
