"""The TOML file: `[section] key = value`, and `role` at the top."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from pdserve.configuration.options import ROLE, SECTIONS, Option, all_options
from pdserve.configuration.other_words import setting_hint

_LARGEST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One known key of the file with its value as TOML has it."""

    option: Option
    raw: object
    origin: str


def read_config_file(path: Path) -> tuple[list[FileEntry], list[str]]:
    """Return the file's known keys, and a problem for each unknown key.

    Raises `ConfigError` when the file cannot be read as TOML.
    """
    entries: list[FileEntry] = []
    problems: list[str] = []
    for section, key, raw in _keys(_parsed(path), path, problems):
        place = f"{path} [{section}] {key}" if section else f"{path} {key}"
        option = all_options().get(key)
        if option is not None and option.section == section:
            entries.append(FileEntry(option, raw, f"file {place}"))
        else:
            problems.append(f"unknown key {key!r} {_where(section)} of {path}{_hint(section, key)}")
    return entries, problems


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean …?" when a known name is close to `name`, else an empty text.

    A name that another tool has for a setting is told by the known name, or explained.
    """
    known = list(known)
    if hint := setting_hint(name, known):
        return hint
    # The common beginning of all flags, or of all variables, would make any two look close.
    bare = {_bare(one): one for one in known}
    close = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=0.6)
    return f": did you mean {bare[close[0]]}?" if close else ""


def _bare(name: str) -> str:
    return name.removeprefix("--").removeprefix("PDSERVE_")


def _parsed(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration file {path}: {reason}") from None
    if len(content) > _LARGEST_FILE_BYTES:
        raise ConfigError(
            f"the configuration file {path} is larger than {_LARGEST_FILE_BYTES} bytes"
        )
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # editors of Windows write a mark
    except UnicodeDecodeError:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"the configuration file {path} is nested too deeply") from None


def _keys(
    document: dict[str, object], path: Path, problems: list[str]
) -> Iterator[tuple[str, str, object]]:
    for name, content in document.items():
        if isinstance(content, dict) and name in SECTIONS:
            for key, raw in content.items():
                yield name, key, raw
        elif isinstance(content, dict):
            problems.append(f"unknown section [{name}] in {path}{suggestion(name, SECTIONS)}")
        elif name in SECTIONS:
            problems.append(f"{name!r} in {path} is a value: wanted a section [{name}]")
        else:
            yield "", name, content


def _where(section: str) -> str:
    return f"in [{section}]" if section else "at the top"


def _hint(section: str, key: str) -> str:
    spelled = key.replace("-", "_")
    option = all_options().get(spelled)
    if option is not None and option.section != section:
        return f": {spelled} belongs {_where(option.section)}"
    nearby = [o.key for o in all_options().values() if o.section == section]
    everywhere = [*all_options(), ROLE.key]
    if hint := setting_hint(key, everywhere):
        return hint
    return suggestion(spelled, nearby) or suggestion(spelled, everywhere)
