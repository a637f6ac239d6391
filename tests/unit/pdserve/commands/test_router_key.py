"""Where `pdserve status` and `pdserve drain` get the API key, and which files they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from pdserve.cli import main
from pdserve.commands import http_client
from pdserve.commands.router_key import router_key

VARIABLES = {"PDSERVE_API_KEY": "of-the-variable"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text("of-the-file\n")
    path.chmod(0o600)
    return path


def test_a_flag_counts_before_the_variable(file: Path) -> None:
    assert router_key({}, {}) == ""
    assert router_key({}, VARIABLES) == "of-the-variable"
    assert router_key({"api_key": "of-the-flag"}, VARIABLES) == "of-the-flag"
    assert router_key({"api_key": ""}, VARIABLES) == ""
    assert router_key({"api_key_file": str(file)}, VARIABLES) == "of-the-file"


def test_two_flags_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="both given"):
        router_key({"api_key": "a", "api_key_file": str(file)}, {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:03o}\): wanted 600, `chmod 600"):
        router_key({"api_key_file": str(file)}, {})


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff\xfe", b"k" * 5000])
def test_a_file_that_holds_no_key_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="wanted one API key and nothing else") as caught:
        router_key({"api_key_file": str(file)}, {})
    assert "words" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.key cannot be read: No such file"):
        router_key({"api_key_file": str(tmp_path / "none.key")}, {})
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="is a folder: wanted a file"):
        router_key({"api_key_file": str(tmp_path)}, {})


@pytest.mark.parametrize("command", [["status"], ["drain", "decode-1"]])
def test_a_command_sends_the_key_of_the_file(
    command: list[str],
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: list[str] = []

    def refuse(*_: object, api_key: str, **__: object) -> object:
        sent.append(api_key)
        raise http_client.RouterRefused("no")

    monkeypatch.setattr("pdserve.commands.cluster_status.fetch_json", refuse)
    monkeypatch.setattr("pdserve.commands.drain_command.opened", refuse)
    assert main([*command, "--api-key-file", str(file)]) == 1
    assert sent == ["of-the-file"]
    file.chmod(0o644)
    assert main([*command, "--api-key-file", str(file)]) == 2
    assert "wanted 600" in capsys.readouterr().err
    assert sent == ["of-the-file"]
