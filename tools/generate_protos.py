"""Generate the Python stubs of `protos/*.proto`, or check that those in the tree are current.

Usage: python tools/generate_protos.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(target: Path) -> None:
    """Write the stubs of every proto file under `target`/protos."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    arguments = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(  # noqa: S603 (a fixed command, no shell)
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *arguments, *sources],
        cwd=ROOT,
        check=True,
    )


def drifted(fresh: Path) -> list[str]:
    """Return the stubs under `fresh` and in the tree that differ or are missing on one side."""
    names = {
        path.name
        for folder in (fresh / "protos", ROOT / "protos")
        for path in folder.iterdir()
        if path.name.endswith(SUFFIXES)
    }
    return sorted(n for n in names if _read(fresh / "protos" / n) != _read(ROOT / "protos" / n))


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = drifted(Path(folder))
    for name in names:
        print(f"protos/{name} is out of date with its .proto: run `make protos`", file=sys.stderr)
    return 1 if names else 0


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
