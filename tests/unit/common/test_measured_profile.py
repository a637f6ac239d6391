"""The file of `pdserve profile`: what is written is read, and anything else is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.measured_profile import (
    MAX_FILE_BYTES,
    UNITS,
    ChunkTime,
    DecodeTime,
    MeasuredProfile,
    ProfiledMachine,
    ProfiledModel,
    SecondTokenTime,
    StreamedTime,
    TransferTime,
    VerifiedTime,
    encode_profile,
    read_measured_profile,
)

PROFILE = MeasuredProfile(
    pdserve_version="0.1.0",
    measured_at="2026-11-27T09:00:00+00:00",
    model=ProfiledModel(
        name="mö", layout="f" * 32, kv_bytes_per_token=4096, block_size=16, max_model_len=2048
    ),
    machine=ProfiledMachine(
        processor="a processor", num_cores=2, memory_bytes=1 << 33, device="", back_end="numba",
        num_blocks=100,
    ),
    decodes=(DecodeTime(rows=1, context=128, step_s=0.01), DecodeTime(rows=2, context=0, step_s=1)),
    chunks=(ChunkTime(tokens=64, context=0, step_s=0.05),),
    verified=(VerifiedTime(sequences=1, tokens_per_sequence=4, step_s=0.02),),
    transfers=(TransferTime(transport="zmq", num_bytes=65_536, seconds=0.001),),
    streamed=(StreamedTime(rows=1, context=9, beside="prompts", step_s=0.02),),
)  # fmt: skip


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "profile", [PROFILE, replace(PROFILE, verified=(), transfers=(), source="published figures")]
)
def test_what_is_written_is_read(tmp_path: Path, profile: MeasuredProfile) -> None:
    path = written(tmp_path, encode_profile(profile))
    assert read_measured_profile(path) == profile
    assert read_measured_profile(path, model="mö") == profile
    assert json.loads(path.read_text(encoding="utf-8"))["units"] == UNITS


def changed(*where: str | int, to: Any) -> str:
    """The file with one value changed, or without it where `to` is `...`."""
    found = json.loads(encode_profile(PROFILE))
    part = found
    for key in where[:-1]:
        part = part[key]
    if to is ...:
        del part[where[-1]]
    else:
        part[where[-1]] = to
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "another format: wanted a JSON object with format 'pdserve profile'"),
        (changed("format", to="other"), "another format"),
        (changed("format", to=...), "another format"),
        (changed("format_version", to=2), "format_version is 2: wanted 3; measure again"),
        (changed("streamed", 0, "beside", to=1), r"beside is 1: wanted one of '', 'answers', 'pro"),
        (
            changed("streamed", 0, "beside", to=["a"]),
            r"streamed\[0\].beside is \['a'\]: wanted one",
        ),
        (changed("model", to=...), "model is missing"),
        (changed("source", to=5), "source is 5: wanted a text"),
        (changed("model", to=[]), r"model is \[\]: wanted an object"),
        (changed("model", "name", to=7), "model.name is 7: wanted a text"),
        (changed("machine", "num_cores", to=-1), "num_cores is -1: wanted an integer, 0 or more"),
        (changed("machine", "num_cores", to=True), "num_cores is True: wanted an integer"),
        (changed("machine", "more", to=1), "machine.more is unknown: wanted processor, num_cores"),
        (changed("decodes", to={}), r"decodes is {}: wanted a list"),
        (changed("decodes", to=[]), "decodes is empty: wanted at least one point"),
        (changed("chunks", to=[]), "chunks is empty"),
        (changed("decodes", 1, to=3), r"decodes\[1\] is 3: wanted an object"),
        (changed("decodes", 1, "step_s", to=0), r"decodes\[1\].step_s is 0: wanted a time above 0"),
        (changed("decodes", 0, "step_s", to=float("nan")), "is nan: wanted a time above 0"),
        (changed("decodes", 0, "step_s", to=float("inf")), "is inf: wanted a time above 0"),
        (changed("decodes", 0, "step_s", to="1" * 100), r"is '1111+\.\.\.: wanted a time above 0"),
        (changed("transfers", 0, "seconds", to=...), r"transfers\[0\].seconds is missing"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as refused:
        read_measured_profile(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("seconds", [-1, True, "0", float("nan"), float("inf")])
def test_a_wait_for_a_second_token_that_cannot_be_is_refused(
    tmp_path: Path, seconds: object
) -> None:
    path = written(tmp_path, changed("second_tokens", to=[{"tokens": 128, "seconds": seconds}]))
    with pytest.raises(
        ConfigError, match=r"second_tokens\[0\].seconds is .*wanted a time, 0 or mo"
    ):
        read_measured_profile(path)


def test_a_second_token_may_come_with_the_first(tmp_path: Path) -> None:
    """Those of a small model come in one event: `pdserve profile` writes that they waited 0 s."""
    second = (SecondTokenTime(tokens=512, seconds=0.0),)
    wanted = replace(PROFILE, second_tokens=second)
    assert read_measured_profile(written(tmp_path, encode_profile(wanted))) == wanted


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, encode_profile(PROFILE))
    with pytest.raises(ConfigError, match="is of the model mö: wanted llama"):
        read_measured_profile(path, model="llama")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="wanted a readable file"):
            read_measured_profile(path)
    path = written(tmp_path, " " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=f"more than {MAX_FILE_BYTES} bytes"):
        read_measured_profile(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_measured_profile(path)
