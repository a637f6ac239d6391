"""The sources of the previous release, out of this repository's history."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.support.cluster.processes import SOURCES

PREVIOUS = "ce93f0b48abbce744c93b3974b222eb85e6da6eb"
"""The last commit of the previous protocol version between routers and nodes."""
_TILES = "engine/runner/kernels/tile_product.py"
_NAME = 'f"tile_of_{num_rows}_rows_{num_vectors}_vectors"'
"""Without AVX-512 that release compiles two functions of one name, and no node of it starts."""


class NotInHistory(Exception):
    """This checkout cannot give the sources of the commit; the text says why."""


def previous_sources() -> Path:
    """Return the folder of the previous release's sources. Raises `NotInHistory`.

    They are kept in `build/`, because compiled kernels are cached by the path of their source.
    """
    folder = SOURCES / "build/releases" / PREVIOUS[:12]
    if not folder.exists():
        extract(SOURCES, PREVIOUS, folder)
    return folder


def extract(repository: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit into `folder`, which is made. Raises `NotInHistory`."""
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise NotInHistory("git is not installed") from None
    if done.returncode:
        raise NotInHistory(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unpacked = Path(temporary) / "sources"
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(unpacked, filter="data")
        mend(unpacked)
        unpacked.rename(folder)


def mend(sources: Path) -> None:
    """Let the previous release start on every processor."""
    tiles = sources / _TILES
    if tiles.exists():
        text = tiles.read_text()
        tiles.write_text(text.replace(f", {_NAME}", f", module.get_unique_name({_NAME})"))
