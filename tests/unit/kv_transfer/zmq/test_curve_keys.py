"""The cluster's key file: written for its owner alone, read only when it is whole and private."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO, cast

import pytest
import zmq.auth

from common.errors import ConfigError
from kv_transfer.zmq.curve_keys import CurveKeys, load_curve_keys, new_curve_keys, write_curve_keys

GOOD = new_curve_keys()


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def certificate(public: bytes, secret: bytes) -> str:
    return f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n'


def test_what_was_written_is_read_back_and_private(tmp_path: Path) -> None:
    path = tmp_path / "kv.key"
    write_curve_keys(path, GOOD)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_curve_keys(path) == GOOD
    assert zmq.auth.load_certificate(path) == (GOOD.public, GOOD.secret)


def test_two_pairs_differ_and_a_secret_is_not_shown() -> None:
    assert new_curve_keys() != GOOD
    assert GOOD.secret.decode() not in repr(GOOD)


def test_a_secret_certificate_of_zmq_is_taken(tmp_path: Path) -> None:
    _, secret_file = zmq.auth.create_certificates(tmp_path, "cluster")
    path = Path(secret_file)
    path.chmod(0o600)
    public, secret = zmq.auth.load_certificate(path)
    assert secret is not None
    assert load_curve_keys(path) == CurveKeys(public, secret)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "kv.key", "precious")
    with pytest.raises(ConfigError, match=r"kv\.key exists already: .* wanted a new file"):
        write_curve_keys(path, GOOD)
    assert path.read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write_curve_keys(tmp_path / "missing" / "kv.key", GOOD)


def test_a_disk_that_is_full_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, mode: str) -> TextIO:
        os.close(descriptor)
        return cast(TextIO, Path("/dev/full").open(mode))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(ConfigError, match=r"kv\.key cannot be written: No space left on device"):
        write_curve_keys(tmp_path / "kv.key", GOOD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "kv.key", certificate(GOOD.public, GOOD.secret), mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:03o}\): wanted 600, `chmod 600"):
        load_curve_keys(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "curve\n",
        f'public-key = "{GOOD.public.decode()}"\n',
        f'secret-key = "{GOOD.secret.decode()}"\n',
        certificate(GOOD.public[:-1], GOOD.secret),
        certificate(GOOD.public, GOOD.secret[:-5]),
        certificate(GOOD.public, b"~" * 40),
        certificate(GOOD.secret, GOOD.public),
        certificate(new_curve_keys().public, GOOD.secret),
        "public-key\nsecret-key\n",
        "\xff\xfe\x00",
    ],
    # The keys are new in every run, and names of tests are not.
    ids=[
        *("empty", "no keys", "no secret", "no public", "short public", "short secret"),
        *("not base 85", "swapped", "of two pairs", "no values", "not text"),
    ],
)
def test_a_file_without_a_whole_pair_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "kv.key", text)
    with pytest.raises(ConfigError, match="holds no CURVE key pair: make one with `pdserve kv-key"):
        load_curve_keys(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory; make one with `pdserve"):
        load_curve_keys(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is no key file"):
        load_curve_keys(tmp_path)
    large = written(tmp_path / "large", "#" * 20_000)
    with pytest.raises(ConfigError, match="is no key file"):
        load_curve_keys(large)
