"""Profiles: the files that come along, what follows from one, and what cannot serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.measured_profile import (
    MEASURED,
    MeasuredProfile,
    TransferTime,
    encode_profile,
    read_measured_profile,
)
from simulator.profile import (
    FOLDER,
    device_of,
    facts_of,
    profile_names,
    read_profile,
)
from simulator.profiles.measured_steps import PUSHED_PARTS
from tools.generate_profiles import FILES, profile_of

NAMES = profile_names()


def whole(name: str = "8b_h100") -> MeasuredProfile:
    return read_measured_profile(FOLDER / f"{name}.json")


def test_profiles_of_a_small_and_a_large_model_come_for_two_devices() -> None:
    assert NAMES == ["70b_h100", "70b_h200", "8b_h100", "8b_h200"] == sorted(FILES)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_come_along_are_whole_and_say_where_they_are_from(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_text() == encode_profile(profile_of(*FILES[name]))
    profile = read_profile(FOLDER / f"{name}.json")
    assert "Not measured by pdserve: worked out from published figures" in profile.source
    facts = facts_of(profile, 64)
    assert facts.max_model_len == profile.max_model_len
    assert facts.layout.num_layers == PUSHED_PARTS
    # A layer of the modelled cache is rounded up to whole numbers.
    assert 0 <= facts.layout.block_bytes - 64 * profile.kv_bytes_per_token < 64 * 16
    assert facts.num_blocks * 64 * profile.kv_bytes_per_token <= profile.kv_memory_bytes
    assert profile.network_bytes_per_s == pytest.approx(45e9, rel=1e-6)
    assert profile.network_latency_s == pytest.approx(20e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "rows", "published_s"),
    [("8b_h100", 1, 7.28e-3), ("8b_h100", 8, 7.71e-3), ("70b_h200", 8, 16.2e-3)],
)
def test_a_step_takes_what_was_published(name: str, rows: int, published_s: float) -> None:
    step = read_profile(FOLDER / f"{name}.json").step
    assert step.ends_of_decodes(0.0, rows, 1000 * rows, 1)[0] == pytest.approx(
        published_s, rel=0.012
    )


def test_a_pool_shorter_than_the_model_bounds_the_context() -> None:
    profile = read_profile(FOLDER / "8b_h100.json")
    facts = facts_of(profile, 1024)
    assert facts.max_model_len == min(profile.max_model_len, (facts.num_blocks - 1) * 1024)


def test_the_network_is_the_best_transport_to_another_machine() -> None:
    lanes = {"shm": 9e9, "zmq": 4e9, "rdma": 40e9}
    found = tuple(
        TransferTime(transport=lane, num_bytes=size, seconds=1e-3 + size / rate)
        for lane, rate in lanes.items()
        for size in (1 << 20, 1 << 24)
    )
    profile = replace(whole(), transfers=found)
    assert device_of(profile).network_bytes_per_s == pytest.approx(40e9)
    profile = replace(whole(), transfers=found[:4])
    device = device_of(profile)
    assert (device.network_bytes_per_s, device.network_latency_s) == pytest.approx((4e9, 1e-3))
    assert device_of(profile, "shm").network_bytes_per_s == pytest.approx(9e9)
    one_size = replace(whole(), transfers=found[2:3])
    assert device_of(one_size).network_bytes_per_s == pytest.approx((1 << 20) / found[2].seconds)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"transfers": ()}, "there is no transfer over zmq"),
        ({"model": replace(whole().model, kv_bytes_per_token=0)}, "have a size of 0"),
        ({"machine": replace(whole().machine, num_blocks=0)}, "have a size of 0"),
    ],
)
def test_a_profile_that_cannot_serve_is_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(encode_profile(replace(whole(), **changed)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"profile .*profile.json: .*{said}"):
        read_profile(path)


def test_a_file_without_a_source_was_measured(tmp_path: Path) -> None:
    kept = {k: v for k, v in json.loads(encode_profile(whole())).items() if k != "source"}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(kept))
    assert read_profile(path).source == MEASURED
