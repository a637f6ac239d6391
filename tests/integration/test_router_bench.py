"""bench.router on a real router, as far as a second of it goes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from bench.router.__main__ import STREAMS, measure
from tests.support.models.tiny_model import make_tiny_model


@pytest.mark.endurance
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores")
def test_every_figure_is_there_and_plausible(tmp_path: Path) -> None:
    options = argparse.Namespace(seconds=0.2, rss_requests=20)
    result = measure(options, make_tiny_model(tmp_path / "tiny"))
    for name in (*(f"c{num_streams}" for num_streams in STREAMS), "paced"):
        load = result[name]
        assert load["requests_per_s"] > 0
        assert load["tokens_per_s"] == pytest.approx(64 * load["requests_per_s"], rel=0.05)
        assert 0 < load["ttft_added_ms_p50"] <= load["ttft_added_ms_p99"]
        assert load["cpu_s_per_1k_requests"] > 0
    assert result["c1"]["tokens_per_event"] < 2, "tokens stream one by one"
    assert result["cpu_s_per_1k_requests"] == result["c128"]["cpu_s_per_1k_requests"]
    assert 0.5 < result["rss_growth"] < 2
