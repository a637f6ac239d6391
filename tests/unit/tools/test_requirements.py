"""The pinned packages: every one has hashes, and each image installs all that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.generate_sbom import bill_of
from tools.requirements import NotPinned, closure, pins

ROOT = Path(__file__).resolve().parents[3]
PINNED = pins((ROOT / "requirements.txt").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = """\
# Written by a tool.
Alpha==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via pdserve (pyproject.toml)
beta-two==2.0 ; sys_platform == 'linux' \\
    --hash=sha256:ba
    # via
    #   alpha
    #   other
other==3.0 \\
    --hash=sha256:ca
    # via pdserve (pyproject.toml)
"""


def printed(*options: str) -> str:
    command = [sys.executable, "tools/requirements.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_pin_has_its_hashes_and_the_packages_that_require_it() -> None:
    found = pins(TEXT)
    assert found["alpha"].hashes == ("sha256:aa", "sha256:ab")
    assert found["beta-two"].version == "2.0"
    assert {"alpha", "other"} <= found["beta-two"].required_by
    assert found["beta-two"].text == (
        "beta-two==2.0 ; sys_platform == 'linux' \\\n    --hash=sha256:ba"
    )


def test_what_a_package_requires_comes_with_it() -> None:
    assert closure(["Alpha[extra]>=0.5; python_version > '3'"], pins(TEXT)) == ["alpha", "beta-two"]
    assert closure([], pins(TEXT)) == []


def test_a_package_without_a_pin_is_an_error() -> None:
    with pytest.raises(NotPinned, match="gamma"):
        closure(["alpha", "gamma>=1"], pins(TEXT))


def test_every_package_has_hashes() -> None:
    assert len(PINNED) > 100
    for name, pin in PINNED.items():
        assert pin.hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in pin.hashes), name
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    heads = [line for line in lines if line and line[0] not in " #"]
    assert len(heads) == len(PINNED)


def test_everything_but_paddle_for_gpus_is_pinned() -> None:
    extras = set(PROJECT["optional-dependencies"]) - {"paddle-gpu"}
    wanted = [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    assert closure([*PROJECT["dependencies"], *wanted], PINNED) == sorted(PINNED)


@pytest.mark.parametrize(
    "extras",
    [["otel"], ["node", "cpu", "otel"], ["node", "gpu"]],
    ids=["router", "node", "GPU node"],
)
def test_what_is_installed_is_printed(extras: list[str]) -> None:
    """Everything that the installed packages require here, and the rest is for other platforms."""
    names = set(pins(printed("--extras", *extras)))
    needed = {part["name"] for part in bill_of(extras)["components"]}
    assert needed <= names
    assert all(";" in PINNED[name].text for name in names - needed)


def test_what_builds_the_project_is_printed() -> None:
    assert set(pins(printed("--build"))) == {"setuptools"}


def test_a_package_is_left_out_but_not_what_it_requires() -> None:
    with_paddle = set(pins(printed("--extras", "node", "cpu")))
    without = set(pins(printed("--extras", "node", "cpu", "--without", "paddlepaddle")))
    assert with_paddle - without == {"paddlepaddle"}
    assert "opt-einsum" in without


def test_both_paddles_have_one_version() -> None:
    """The wheel for GPUs is in no common index, so it has no line in requirements.txt."""
    gpu, setuptools = PROJECT["optional-dependencies"]["paddle-gpu"]
    assert setuptools in PROJECT["optional-dependencies"]["cpu"]
    assert gpu == f"paddlepaddle-gpu=={PINNED['paddlepaddle'].version}"


def test_no_index_is_named() -> None:
    assert "://" not in (ROOT / "requirements.txt").read_text()
