"""`pdserve api-keys`: what a person and a script see of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli import main
from router.access.api_keys import hash_api_key, load_api_keys


def test_the_key_alone_is_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "api_keys.json"
    assert main(["api-keys", "add", str(path), "alice"]) == 0
    printed = capsys.readouterr()
    (key,) = load_api_keys(path)
    assert key.sha256 == hash_api_key(printed.out.strip().encode())
    assert printed.out.count("\n") == 1
    assert "shown this once" in printed.err
    assert (key.is_admin, key.requests_per_minute, key.max_concurrent) == (False, 0, 0)


def test_limits_admins_and_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "api_keys.json")
    limits = ["--requests-per-minute", "60", "--max-concurrent", "4"]
    assert main(["api-keys", "add", file, "alice", *limits]) == 0
    assert main(["api-keys", "add", file, "operator", "--admin"]) == 0
    made = capsys.readouterr().out.split()

    assert main(["api-keys", "list", file]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:4] for line in shown.splitlines()] == [
        ["NAME", "ADMIN", "REQUESTS/MINUTE", "AT"],
        ["alice", "no", "60", "4"],
        ["operator", "yes", "no", "limit"],
    ]
    assert not any(key in shown for key in made)

    assert main(["api-keys", "revoke", file, "alice"]) == 0
    assert "within a second" in capsys.readouterr().out
    assert [key.name for key in load_api_keys(Path(file))] == ["operator"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["forget", "FILE"], "forget"),
        (["add", "FILE"], "NAME"),
        (["add", "FILE", "a b"], "name is 'a b'"),
        (["add", "FILE", "a", "--max-concurrent", "many"], "many"),
        (["add", "FILE", "a", "--max-concurrent", "-1"], "max_concurrent is -1"),
        (["add", "FILE", "a", "--port", "1"], "unexpected argument: --port"),
        (["revoke", "FILE", "a"], "No such file"),
        (["list", "FILE"], "No such file"),
    ],
)
def test_mistakes_exit_with_2_and_make_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "api_keys.json"
    words = [str(path) if word == "FILE" else word for word in arguments]
    assert main(["api-keys", *words]) == 2
    assert said in capsys.readouterr().err
    assert not path.exists()


def test_the_help_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    for words, usage in (
        (["api-keys"], "usage: pdserve api-keys COMMAND [flags]\n"),
        (["api-keys", "add"], "usage: pdserve api-keys add FILE NAME [flags]\n"),
        (["api-keys", "revoke"], "usage: pdserve api-keys revoke FILE NAME [flags]\n"),
        (["api-keys", "list"], "usage: pdserve api-keys list FILE [flags]\n"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert capsys.readouterr().out.startswith(usage)
