"""Print what an image or an environment installs before the project itself, for pip.

    python tools/requirements.py [--extras NAME…] [--without NAME…]
    python tools/requirements.py --build

The lines are those of requirements.txt that the project with these extras requires, directly or
not, each with its version and the hashes of its files: `pip install --require-hashes -r` accepts no
other file. `--build` prints what builds the project. `--without` leaves out a package, but not what
it requires. An image runs this before anything is installed, and reads two files alone, so the
layer with the dependencies is built again only when they change.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HEAD = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!]+)")


class NotPinned(Exception):
    """The project requires a package that requirements.txt does not have."""


@dataclass(frozen=True)
class Pin:
    """One package of requirements.txt."""

    version: str
    hashes: tuple[str, ...]
    """The hashes of all files of this version, as `sha256:…`."""
    required_by: frozenset[str]
    """The names of the packages that require it, the project aside."""
    text: str
    """The lines for pip: name, version, marker and hashes."""


def pins(text: str) -> dict[str, Pin]:
    """Return each package of the text of requirements.txt by its normal name.

    The text has uv's format: a line that begins with the name, indented lines with hashes, and
    comments that say after `via` who requires it.
    """
    blocks = re.split(r"\n(?=[A-Za-z0-9])", "\n" + text)
    found = (_pin(block) for block in blocks if _HEAD.match(block))
    return dict(found)


def _pin(block: str) -> tuple[str, Pin]:
    lines = block.splitlines()
    head = _HEAD.match(block)
    assert head is not None
    comments = " ".join(line.strip(" #") for line in lines if line.lstrip().startswith("#"))
    return normal(head["name"]), Pin(
        version=head["version"],
        hashes=tuple(re.findall(r"--hash=(\S+)", block)),
        required_by=frozenset(normal(one) for one in _NAME.findall(comments) if one != "via"),
        text="\n".join(line for line in lines if not line.lstrip().startswith("#")),
    )


def closure(wanted: Iterable[str], pinned: Mapping[str, Pin]) -> list[str]:
    """Return the names of all packages that `wanted` requirements need, sorted.

    Raises `NotPinned`.
    """
    names = {_required(requirement) for requirement in wanted}
    missing = sorted(names - pinned.keys())
    if missing:
        raise NotPinned(f"not in requirements.txt: {', '.join(missing)}; wanted `make pins`")
    while more := {name for name, pin in pinned.items() if pin.required_by & names} - names:
        names |= more
    return sorted(names)


def _required(requirement: str) -> str:
    """Return the name in `name[extra]>=1; marker`."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return normal(found[0])


def normal(name: str) -> str:
    """Return the one spelling that a package index uses for `name`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _wanted(extras: Collection[str]) -> list[str]:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def _builders() -> list[str]:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    return list(project["build-system"]["requires"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", nargs="*", default=[], help="of the project")
    parser.add_argument("--without", nargs="*", default=[], help="packages to leave out")
    parser.add_argument("--build", action="store_true", help="what builds the project")
    options = parser.parse_args()
    pinned = pins(Path("requirements.txt").read_text(encoding="utf-8"))
    try:
        names = closure(_builders() if options.build else _wanted(options.extras), pinned)
    except NotPinned as error:
        sys.exit(str(error))
    for name in names:
        if name not in options.without:
            print(pinned[name].text)


if __name__ == "__main__":
    main()
