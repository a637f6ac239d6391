"""What every process shows of itself, a router as well as a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest

from common.nodes import Role
from common.version import PROTOCOL_VERSION, VERSION
from http_serving.process_metrics import process_registry
from pdserve.keys.keys_init import HOLDERS
from router.watch.http_metrics import HttpMetrics
from tests.support.key_folders import issue, make_keys, node_keys, put


@pytest.mark.parametrize("role", [Role.ROUTER, Role.DECODE])
def test_the_version_and_the_role_are_labels(role: Role) -> None:
    registry = process_registry(lambda: role)
    labels = {
        "version": VERSION,
        "role": role.value,
        "protocol": str(PROTOCOL_VERSION),
    }
    assert registry.get_sample_value("pdserve_build_info", labels) == 1
    assert registry.get_sample_value("process_resident_memory_bytes")


def test_the_end_of_the_certificate_follows_a_renewal(tmp_path: Path) -> None:
    name = "pdserve_certificate_end_timestamp_seconds"
    assert process_registry(lambda: Role.DECODE).get_sample_value(name) is None
    folder = make_keys(tmp_path / "keys")
    keys = node_keys(folder)
    registry = process_registry(lambda: Role.DECODE, keys)
    before = registry.get_sample_value(name)
    assert before == keys.tls.expires_at_s
    put(issue(folder, HOLDERS["node"], days=30), folder / "node")
    keys.reload_if_changed()
    after = registry.get_sample_value(name)
    assert after is not None
    assert after - before == pytest.approx(23 * 86400, abs=60)


def test_the_end_of_the_certificate_of_redis_is_shown_once_it_is_known(tmp_path: Path) -> None:
    name = "pdserve_redis_certificate_end_timestamp_seconds"
    keys = node_keys(make_keys(tmp_path / "keys"))
    registry = process_registry(lambda: Role.DECODE, keys)
    assert registry.get_sample_value(name) is None
    keys.redis_expires_at_s = 2e9
    assert registry.get_sample_value(name) == 2e9


def test_the_targets_of_latency_are_bounds_of_the_histograms() -> None:
    registry = process_registry(lambda: Role.ROUTER)
    HttpMetrics(registry)
    text = generate_latest(registry).decode()
    assert 'pdserve_time_to_first_token_seconds_bucket{le="2.0"}' in text
    assert 'pdserve_time_per_output_token_seconds_bucket{le="0.15"}' in text
