"""Traces switched on and off: what is imported, what is missing, what is sampled."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.nodes import Role
from common.observing.clock import MonotonicClock
from common.observing.tracing import NO_SPAN, NO_TRACING
from common.settings.config import Config
from common.settings.tracing_config import TracingConfig
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.roles import otel
from pdserve.roles.make_tracing import FILES, make_tracing
from pdserve.roles.otel import OtelTracing
from tests.support.clocks.manual_clock import ManualClock
from tests.support.clocks.stall_free_clock import timed

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-"


def config_with(endpoint: str) -> Config:
    return Config(role=Role.DECODE, tracing=TracingConfig(otel_endpoint=endpoint))


def tracing_to_nowhere(ratio: float) -> OtelTracing:
    config = TracingConfig(
        otel_endpoint=f"http://127.0.0.1:{free_loopback_port()}", otel_sample_ratio=ratio
    )
    return OtelTracing(config, role=Role.ROUTER, node_id="r", clock=MonotonicClock())


def test_off_is_nothing() -> None:
    assert make_tracing(config_with("")) is NO_TRACING


def test_a_node_without_traces_imports_nothing_of_them() -> None:
    code = (
        "import sys, pdserve.roles.make_tracing, pdserve.roles.engine_role, node.life.engine_node, "
        "node.life.make_flow\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pdserve.roles.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"otel_endpoint is .*pip install '\.\[otel\]'"):
        make_tracing(config_with("http://c:4317"))


@pytest.mark.covers("M10")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"), ("OTEL_ATTRIBUTE_COUNT_LIMIT", "many")],
)
def test_a_variable_that_the_sdk_refuses_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.delitem(sys.modules, "pdserve.roles.otel")  # some are read by its import
    with pytest.raises(ConfigError, match=rf"^traces: .*{variable}"):
        make_tracing(config_with("http://127.0.0.1:1"))


@pytest.mark.parametrize("variable", FILES)
@pytest.mark.parametrize("path", ["gone.pem", "."])
def test_a_file_that_cannot_be_read_is_named_with_its_variable(
    variable: str,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / path))
    with pytest.raises(ConfigError, match=rf"^{variable} is '.*', which cannot be read: "):
        make_tracing(config_with("https://127.0.0.1:1"))
    if "TRACES" not in variable:  # nothing is encrypted there
        make_tracing(config_with("http://127.0.0.1:1")).close()
    assert caplog.text == ""


def test_the_caller_decides_before_the_ratio_does() -> None:
    now_s = MonotonicClock().now_s()
    none, every = tracing_to_nowhere(0.0), tracing_to_nowhere(1.0)
    try:
        assert none.span("request", now_s, parent="") is NO_SPAN
        assert none.span("request", now_s, parent=PARENT + "01").is_recording
        assert every.span("request", now_s, parent=PARENT + "00") is NO_SPAN
        root = every.span("request", now_s, parent="no context at all")
        assert root.is_recording
        child = root.child("attempt", now_s)
        assert child.traceparent[3:35] == root.traceparent[3:35] != PARENT[3:35]
        assert child.traceparent[36:52] != root.traceparent[36:52]
        remote = every.span("decode", now_s, parent=child.traceparent)
        assert remote.traceparent[:36] == child.traceparent[:36]
    finally:
        none.close()
        every.close()


def test_closing_does_not_wait_for_a_collector_that_is_away() -> None:
    tracing = tracing_to_nowhere(1.0)
    now_s = MonotonicClock().now_s()
    for _ in range(2000):
        tracing.span("request", now_s, parent="").end(now_s)
    _, took_s = timed(tracing.close)
    assert took_s < 5


@pytest.mark.parametrize("delayed", [0, 1, 2])
@pytest.mark.parametrize("is_wall_late", [False, True])
def test_a_thread_that_loses_the_processor_between_two_clocks_does_not_shift_its_spans(
    delayed: int, is_wall_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of several processes lie side by side: an effect must not come before its cause."""
    clock = ManualClock(10.0)
    offset_ns = 1_000 * 10**9
    num_read = itertools.count()

    def wall_ns() -> int:
        is_delayed = next(num_read) == delayed
        clock.advance(0.02 * (is_delayed and is_wall_late))
        now_ns = round(clock.now_s() * 1e9)
        clock.advance(0.02 * (is_delayed and not is_wall_late))
        return offset_ns + now_ns

    monkeypatch.setattr("pdserve.roles.otel.time.time_ns", wall_ns)
    assert otel.wall_offset_ns(clock) == offset_ns
