"""What one machine does with one model: the file that `pdserve profile` writes.

`pdserve plan` reads it. Files in this format come with the simulator for devices that nobody has at
hand: `source` says which of both a file is. All times are in seconds and all sizes in bytes;
`UNITS` is written into the file, for people. A reader takes files of its own `FORMAT_VERSION`, and
no field that it does not know: a file of another format is refused with what is wrong in it, and
not half understood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from common.errors import ConfigError

FORMAT = "pdserve profile"
FORMAT_VERSION = 3
MEASURED = "measured by pdserve profile"
MAX_FILE_BYTES = 4 << 20
UNITS = {
    "step_s": "seconds of a step",
    "seconds": "seconds from the first byte's departure to the last acknowledgement",
    "rows": "sequences that decode one token each",
    "context": "tokens in the KV cache before those that the step computes, of each sequence",
    "tokens": "prompt tokens of one sequence",
    "tokens_per_sequence": "one token and its drafts",
    "num_bytes": "bytes of KV",
    "beside": "what another node of the machine computed at the same time; empty: nothing",
    "nodes": "nodes that serve a request: 1 where one computes its prompt and its answer",
    "compute_s": "seconds from the first step of a prompt to its first token, on its node",
}

Beside = Literal["", "answers", "prompts"]
"""Steps of another node: none, those that decode alone, or those that compute prompts."""
_Wait = Annotated[float, "0 or more"]
"""Seconds between two tokens, 0 where they came in one event: other times are above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """The model. `name` is its folder's, `layout` the fingerprint of its KV blocks."""

    name: str
    layout: str
    kv_bytes_per_token: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledMachine:
    """The machine, and what of it the node had: `num_blocks` KV blocks fitted beside the model."""

    processor: str
    num_cores: int
    memory_bytes: int
    device: str
    back_end: str
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """A step that decodes a token of each of `rows` sequences."""

    rows: int
    context: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """A step that computes a chunk of a prompt, and draws nothing."""

    tokens: int
    context: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTime:
    """A step that verifies drafts of each of `sequences` sequences."""

    sequences: int
    tokens_per_sequence: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """KV that one transfer moved between two pools of this machine."""

    transport: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTime:
    """A step of a node as clients of a router see it: from a token of `rows` answers to the next.

    `context` is the mean length of their sequences.
    """

    rows: int
    context: int
    beside: Beside
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTime:
    """A request to a router without load, from its sending to its first token."""

    tokens: int
    beside: Beside
    nodes: int
    seconds: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondTokenTime:
    """From the first token of an answer to the second, as the client sees it: the node that decodes
    waits for the KV of a prompt of so many tokens, and runs a step. 0: both came together."""

    tokens: int
    seconds: _Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """Everything. Each time is the least of a few, of what clients see the median; points that
    would have taken too long are left out. `verified` is empty where the speculative method drafts
    nothing, and the times of tokens that clients see where no cluster served."""

    pdserve_version: str
    measured_at: str
    """A time of day in UTC, ISO 8601."""
    model: ProfiledModel
    machine: ProfiledMachine
    decodes: tuple[DecodeTime, ...]
    chunks: tuple[ChunkTime, ...]
    verified: tuple[VerifiedTime, ...]
    transfers: tuple[TransferTime, ...]
    streamed: tuple[StreamedTime, ...] = ()
    first_tokens: tuple[FirstTokenTime, ...] = ()
    second_tokens: tuple[SecondTokenTime, ...] = ()
    source: str = MEASURED
    """The origin of the times, in words."""


def encode_profile(profile: MeasuredProfile) -> str:
    """Return the file's text: JSON, one line for each measured point."""
    facts = {"format": FORMAT, "format_version": FORMAT_VERSION, "units": UNITS} | asdict(profile)
    lines = []
    for name, value in facts.items():
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list | tuple) and value:
            points = ",\n    ".join(json.dumps(point) for point in value)
            shown = f"[\n    {points}\n  ]"
        lines.append(f'  "{name}": {shown}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_measured_profile(path: Path, *, model: str = "") -> MeasuredProfile:
    """Read a profile. Raises `ConfigError`, which names the file and what is wrong with it.

    `model` is the name of the model that it has to be of; empty: any.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}: wanted a readable file") from error
    try:
        profile = decode_profile(content)
    except ValueError as wrong:
        raise ConfigError(f"profile {path}: {wrong}") from wrong
    if model and profile.model.name != model:
        raise ConfigError(f"profile {path} is of the model {profile.model.name}: wanted {model}")
    return profile


def decode_profile(content: bytes) -> MeasuredProfile:
    """Return what `encode_profile` wrote. Raises `ValueError` for anything else."""
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes: wanted a file of `pdserve profile`")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("no JSON: wanted a file of `pdserve profile`") from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"another format: wanted a JSON object with format {FORMAT!r}")
    version = found.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"format_version is {version!r}: wanted {FORMAT_VERSION}; measure again with "
            "`pdserve profile` of this version"
        )
    found.pop("units", None)
    profile = _decoded(MeasuredProfile, found, "")
    for name in ("decodes", "chunks"):
        if not getattr(profile, name):
            raise ValueError(f"{name} is empty: wanted at least one point")
    return profile


T = TypeVar("T")


def _decoded(kind: type[T], found: object, where: str) -> T:
    """Return a dataclass from a JSON object with its fields, all without defaults, and no other."""
    prefix = f"{where}." if where else ""
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} is {_shown(found)}: wanted an object")
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    required = [one.name for one in fields(kind) if one.default is MISSING]  # type: ignore[arg-type]
    for name in required:
        if name not in found:
            raise ValueError(f"{prefix}{name} is missing")
    for name in found:
        if name not in names:
            raise ValueError(f"{prefix}{name} is unknown: wanted {', '.join(names)}")
    hints = get_type_hints(kind, include_extras=True)
    values = {name: _value(hints[name], found[name], prefix + name) for name in found}
    return kind(**values)


def _value(hint: Any, found: object, where: str) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(found, list):
            raise ValueError(f"{where} is {_shown(found)}: wanted a list")
        kind = get_args(hint)[0]
        return tuple(_decoded(kind, one, f"{where}[{index}]") for index, one in enumerate(found))
    if get_origin(hint) is Literal:
        if found not in get_args(hint):
            wanted = ", ".join(repr(one) for one in get_args(hint))
            raise ValueError(f"{where} is {_shown(found)}: wanted one of {wanted}")
        return found
    if hint is str:
        if not isinstance(found, str):
            raise ValueError(f"{where} is {_shown(found)}: wanted a text")
        return found
    if hint is int:
        if type(found) is not int or found < 0:
            raise ValueError(f"{where} is {_shown(found)}: wanted an integer, 0 or more")
        return found
    if hint is float:
        if type(found) not in (int, float) or not 0 < found < math.inf:  # type: ignore[operator]
            raise ValueError(f"{where} is {_shown(found)}: wanted a time above 0")
        return float(found)  # type: ignore[arg-type]
    if hint is _Wait:
        if type(found) not in (int, float) or not 0 <= found < math.inf:  # type: ignore[operator]
            raise ValueError(f"{where} is {_shown(found)}: wanted a time, 0 or more")
        return float(found)  # type: ignore[arg-type]
    return _decoded(hint, found, where)


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 40 else text[:37] + "..."
