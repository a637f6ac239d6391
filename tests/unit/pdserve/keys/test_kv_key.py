"""`pdserve kv-key`: a key file for `--kv-key`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.zmq.curve_keys import load_curve_keys
from pdserve.cli import main


def test_it_writes_a_private_key_and_says_what_to_do_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv.key"
    assert main(["kv-key", str(path)]) == 0
    assert "--kv-key" in capsys.readouterr().out
    keys = load_curve_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600

    assert main(["kv-key", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert load_curve_keys(path) == keys


def test_the_secret_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.key"
    main(["kv-key", str(path)])
    printed = capsys.readouterr()
    keys = load_curve_keys(path)
    for key in (keys.secret, keys.public):
        assert key.decode() not in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "FILE"), (["FILE", "--port", "1"], "unexpected argument: --port")]
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "kv.key"
    assert main(["kv-key", *(str(path) if one == "FILE" else one for one in arguments)]) == 2
    assert said in capsys.readouterr().err
    assert not path.exists()


def test_the_help_shows_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kv-key", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: pdserve kv-key FILE [flags]\n")
    assert "--kv-key" in text
