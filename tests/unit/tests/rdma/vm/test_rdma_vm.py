"""The virtual machine for RDMA, where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rdma.vm import image
from tests.rdma.vm.__main__ import main


def test_it_is_skipped_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda tool: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["--", "true"]) == 0
    assert "skipped: no virtual machine for RDMA here: not root" in capsys.readouterr().out
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert main(["--", "true"]) == 0
    assert "no apt-get" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["sh", "-c", "echo no network >&2; exit 3"], "sh failed: no network"),
        (["sleep", "60"], "sleep took more than 0.1 s"),
        (["pdserve-no-such-tool"], "pdserve-no-such-tool is not here"),
    ],
)
def test_a_step_that_fails_says_which_and_why(command: list[str], why: str) -> None:
    with pytest.raises(image.CannotBuild, match=why):
        image.run(command, 0.1 if "sleep" in command else 20)


def test_modules_are_kept_with_what_they_need() -> None:
    listed = (
        "net/veth.ko:\n"
        "rxe/rdma_rxe.ko: core/ib_core.ko net/tunnel.ko\n"
        "core/ib_core.ko:\n"
        "sound/drum.ko: sound/core.ko\n"
    )
    assert image.with_dependencies(listed) == {
        "net/veth.ko",
        "rxe/rdma_rxe.ko",
        "core/ib_core.ko",
        "net/tunnel.ko",
    }
