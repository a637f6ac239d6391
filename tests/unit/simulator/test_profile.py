"""Profiles: the files that come along, what follows from them, and what is wrong in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from simulator.profile import FOLDER, PUSHED_PARTS, facts_of, read_profile

FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_that_come_along_are_whole_and_say_where_they_are_from(path: Path) -> None:
    profile = read_profile(path)
    assert "measured" in profile.source
    facts = facts_of(profile, 64)
    assert facts.max_model_len == profile.max_model_len
    assert facts.layout.num_layers == PUSHED_PARTS
    # A layer of the modelled cache is rounded up to whole numbers.
    assert 0 <= facts.layout.block_bytes - 64 * profile.kv_bytes_per_token < 64 * 16
    assert facts.num_blocks * 64 * profile.kv_bytes_per_token <= profile.kv_memory_bytes


def test_the_8b_profile_takes_what_was_published() -> None:
    """Milliseconds per token of 1 and 8 requests of 1,000 tokens: 7.28 and 7.71 were published."""
    cost = read_profile(FOLDER / "8b_h100.json").step
    assert cost.seconds(1, 1000) == pytest.approx(7.28e-3, rel=0.01)
    assert cost.seconds(8, 8000) == pytest.approx(7.71e-3, rel=0.01)


def test_a_pool_shorter_than_the_model_bounds_the_context() -> None:
    profile = read_profile(FOLDER / "8b_h100.json")
    facts = facts_of(profile, 1024)
    assert facts.max_model_len == min(profile.max_model_len, (facts.num_blocks - 1) * 1024)


def written(folder: Path, **changed: Any) -> Path:
    found = json.loads(FILES[0].read_text())
    found["step"] |= changed.pop("step", {})
    path = folder / "profile.json"
    path.write_text(json.dumps({k: v for k, v in (found | changed).items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": 5}, "device is 5: wanted a text"),
        ({"max_model_len": 0}, "max_model_len is 0: wanted a number above 0"),
        ({"max_model_len": 5.5}, "max_model_len is 5.5: wanted a number above 0"),
        ({"network_latency_s": -1.0}, "network_latency_s is -1.0: wanted a number, 0 or more"),
        ({"network_latency_s": True}, "network_latency_s is True: wanted a number"),
        ({"device": None}, "wanted an object with device, kv_bytes_per_token, kv_memory_bytes"),
        ({"more": 1}, "wanted an object with device"),
        ({"step": {"token_s": "fast"}}, "token_s is 'fast': wanted a number"),
        ({"step": {"more": 1}}, "wanted an object with block_copy_s"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"profile .*profile.json: {said}"):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00"])
def test_what_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile .*profile\.json"):
        read_profile(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")
