"""Request traces in the two formats that are published, told apart by their first line.

Azure      CSV: TIMESTAMP,ContextTokens,GeneratedTokens; a date and time per line
Mooncake   one JSON object per line: timestamp (ms), input_length, output_length, hash_ids;
           one hash id stands for 512 tokens of the prompt, and equal ids for equal tokens
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from common.errors import ConfigError
from common.kv.blocks import blocks_for

TOKENS_PER_HASH_ID = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: seconds after the trace's first one, and its lengths in tokens.

    `hash_ids` name the prompt's content, 512 tokens each; empty when no other prompt shares any.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, most_requests: int | None = None) -> list[TraceRequest]:
    """Return the first `most_requests` requests of a file (None: all), sorted by arrival from 0.

    Raises `ConfigError`, which names file, line and the expected content.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            numbered = ((n, line.strip()) for n, line in enumerate(file, 1))
            lines = ((n, line) for n, line in numbered if line)
            return _from_zero(list(islice(_requests(path, lines), most_requests)), path)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not UTF-8 text") from error


def _requests(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRequest]:
    number, first = next(lines, (1, ""))
    parse: Callable[[str], TraceRequest]
    if first == AZURE_HEADER:
        parse = _azure_request
    elif first.startswith("{"):
        parse = _mooncake_request
        yield _parsed(path, number, first, parse)
    else:
        raise ConfigError(
            f"trace {path} begins with {first[:60]!r}: wanted {AZURE_HEADER!r} (Azure) or "
            "a JSON object per line (Mooncake)"
        )
    for number, line in lines:
        yield _parsed(path, number, line, parse)


def _parsed(
    path: Path, number: int, line: str, parse: Callable[[str], TraceRequest]
) -> TraceRequest:
    try:
        return parse(line)
    except (ValueError, RecursionError) as error:  # of json, int, datetime, and this module itself
        raise ConfigError(f"trace {path}, line {number}: {error}") from error


def _azure_request(line: str) -> TraceRequest:
    fields = line.split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields: wanted 3, {AZURE_HEADER}")
    try:
        at_s = datetime.fromisoformat(fields[0] + "+00:00").timestamp()
    except ValueError:
        wanted = "a time such as 2023-11-16 18:15:46.6805900"
        raise ValueError(f"TIMESTAMP is {fields[0]!r}: wanted {wanted}") from None
    return TraceRequest(
        at_s,
        _length("ContextTokens", _integer(fields[1])),
        _length("GeneratedTokens", _integer(fields[2])),
    )


def _integer(text: str) -> object:
    """Return the integer in a text, or the text itself where it is none."""
    return int(text) if text.strip().lstrip("-").isdecimal() else text


def _mooncake_request(line: str) -> TraceRequest:
    row = None
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"{line[:40]!r}: wanted a JSON object")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in row:
            raise ValueError(f"there is no {name}")
    hash_ids = row["hash_ids"]
    num_prompt = _length("input_length", row["input_length"])
    if not isinstance(hash_ids, list) or not all(
        type(h) is int and 0 <= h < 1 << 30 for h in hash_ids
    ):
        raise ValueError("hash_ids: wanted a list of integers from 0 to 2^30 - 1")
    if len(hash_ids) != blocks_for(num_prompt, TOKENS_PER_HASH_ID):
        raise ValueError(
            f"{len(hash_ids)} hash_ids for input_length {num_prompt}: "
            f"wanted {blocks_for(num_prompt, TOKENS_PER_HASH_ID)}, one for {TOKENS_PER_HASH_ID}"
        )
    at_ms = row["timestamp"]
    if type(at_ms) not in (int, float) or not 0 <= at_ms < 1e15:
        raise ValueError(f"timestamp is {at_ms!r}: wanted milliseconds, 0 or more")
    return TraceRequest(
        at_ms / 1000, num_prompt, _length("output_length", row["output_length"]), tuple(hash_ids)
    )


def _length(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} is {value!r}: wanted 1 to {_MOST_TOKENS} tokens")
    return value


def _from_zero(requests: list[TraceRequest], path: Path) -> list[TraceRequest]:
    if not requests:
        raise ConfigError(f"trace {path} holds no requests")
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    began_s = ordered[0].arrival_s
    return [
        TraceRequest(r.arrival_s - began_s, r.num_prompt, r.num_output, r.hash_ids) for r in ordered
    ]
