"""Print the software bill of materials of one image, as CycloneDX 1.5 in JSON.

    python -m tools.generate_sbom [--extras NAME…]

It lists the Python packages that the project with these extras requires, at the versions that are
installed here, which are those of requirements.txt. Debian's packages of the base image are not in
it.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from common.version import VERSION

_LICENSE_KEYS = ("License-Expression", "License")
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


class NotInstalled(Exception):
    """A package that the project requires is not installed, so its version is unknown."""


def bill_of(extras: Iterable[str]) -> dict[str, Any]:
    """Return the document for the project with `extras`. Raises `KeyError` or `NotInstalled`."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    needs = _closure(wanted)
    parts = [_component(metadata.distribution(name)) for name in sorted(needs)]
    root = _purl("pdserve", VERSION)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "pdserve",
                "version": VERSION,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": parts,
        "dependencies": [
            {"ref": root, "dependsOn": _refs(Requirement(one) for one in wanted)},
            *({"ref": _ref(name), "dependsOn": _refs(needs[name])} for name in sorted(needs)),
        ],
    }


def _closure(wanted: Iterable[str]) -> dict[str, list[Requirement]]:
    """Return every package that is needed, directly or not, with what it needs itself."""
    needs: dict[str, list[Requirement]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(one) for one in wanted]
    while waiting:
        requirement = waiting.pop()
        name = _normal(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found = [one for one in _required_by(name) if _applies(one, extra)]
            needs.setdefault(name, []).extend(found)
            waiting += found
    return needs


def _required_by(name: str) -> list[Requirement]:
    try:
        return [Requirement(one) for one in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:
        raise NotInstalled(f"{name} is not installed: wanted `make env`") from None


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _component(package: metadata.Distribution) -> dict[str, Any]:
    name, version = _normal(package.metadata["Name"]), package.version
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _purl(name, version),
        "name": name,
        "version": version,
        "purl": _purl(name, version),
    }
    known = {key: package.metadata[key] for key in _LICENSE_KEYS if key in package.metadata}
    named, other = (known.get(key, "").strip() for key in _LICENSE_KEYS)
    # Some packages give the whole text as the name of their license.
    other = other.partition("\n")[0][:100]
    if named:
        component["licenses"] = [{"expression": named}]
    elif other:
        component["licenses"] = [{"license": {"name": other}}]
    return component


def _refs(requirements: Iterable[Requirement]) -> list[str]:
    return sorted({_ref(one.name) for one in requirements})


def _ref(name: str) -> str:
    return _purl(_normal(name), metadata.version(name))


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", nargs="*", default=[], help="of the project")
    print(json.dumps(bill_of(parser.parse_args().extras), indent=1))


if __name__ == "__main__":
    main()
