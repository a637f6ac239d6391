"""The API key that a command sends to a router: from a file, a flag or a variable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files.secret_files import secret_file_problem

VARIABLE = "PDSERVE_API_KEY"
_MOST_BYTES = 4 << 10


def router_key(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the key, '' for none. A flag counts before the variable.

    `api_key_file` is the path of a file that holds the key and nothing else.

    Raises `ConfigError` when both flags are given, or the file is usable by others (as for the
    files of `--keys`), missing, empty or no key.
    """
    if "api_key_file" not in flags:
        return str(flags.get("api_key", environ.get(VARIABLE, "")))
    if "api_key" in flags:
        raise ConfigError("--api-key and --api-key-file are both given: wanted one of them")
    return _read_key(Path(flags["api_key_file"]))


def _read_key(path: Path) -> str:
    try:
        problem = secret_file_problem(path, path.stat())
        if problem:
            raise ConfigError(f"--api-key-file {problem}")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    words = content.split()
    if len(words) != 1 or len(content) > _MOST_BYTES or not words[0].isascii():
        raise ConfigError(f"--api-key-file {path}: wanted one API key and nothing else")
    return words[0].decode("ascii")
