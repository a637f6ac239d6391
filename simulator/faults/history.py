"""A history of a cluster: its shape, its requests and its faults, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from simulator.faults.kinds import CHANGES, GRAMMARS, STORE, WAYS, FaultKind
from simulator.faults.shape import (
    MOST_BLOCKS,
    ROUTER,
    Shape,
    node_names,
    problems_of,
    router_names,
)

FORMAT = 14
MOST_REQUESTS, MOST_SECONDS = 1000, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, at `at_s`, of `target` (a name of a node or a router, or `store`).

    `other` is the second one where it is between two, and for a change the router that is asked.
    """

    at_s: float
    kind: FaultKind
    target: str
    other: str = ""
    span_s: float = 0.0
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequest:
    """One request. Requests of one `group` begin with the same `num_shared` tokens.

    It goes to `router`, and is of a `session` unless that is empty. Its client leaves at
    `leaves_at_s`; None: it stays. With `is_cut` its answer may end where its node holds no more.
    It shares KV with requests of the same `salt` alone. Its answer follows the `grammar` of that
    name, unless it is empty. With `has_logprobs` it wants log probabilities of its answer, and with
    `has_prompt_logprobs` those of its prompt.
    """

    at_s: float
    name: str
    num_prompt: int
    group: int
    num_shared: int
    max_tokens: int
    seed: int
    deadline_s: float
    router: str = ROUTER
    priority: int = 0
    session: str = ""
    leaves_at_s: float | None = None
    is_cut: bool = False
    salt: str = ""
    grammar: str = ""
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False

    def later(self, span_s: float) -> AskedRequest:
        """Return the request as it comes later; its client leaves as much later, if it does."""
        leaves_at_s = self.leaves_at_s
        return replace(
            self,
            at_s=round(self.at_s + span_s, 4),
            leaves_at_s=None if leaves_at_s is None else round(leaves_at_s + span_s, 4),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The shape of one cluster, its requests and its faults, in order of time."""

    seed: int
    shape: Shape
    requests: tuple[AskedRequest, ...]
    faults: tuple[Fault, ...]

    def __len__(self) -> int:
        """Return how many requests and faults there are."""
        return len(self.requests) + len(self.faults)

    def only(self, kept: Sequence[int]) -> History:
        """Return the history with these of its parts: requests by index, then faults."""
        wanted, num = set(kept), len(self.requests)
        return replace(
            self,
            requests=tuple(one for i, one in enumerate(self.requests) if i in wanted),
            faults=tuple(one for i, one in enumerate(self.faults, num) if i in wanted),
        )


def to_json(history: History) -> str:
    """Return the history as JSON, which `read_history` reads."""
    found = {"format": FORMAT, **asdict(history)}
    return json.dumps(found, indent=1, default=lambda value: value.value) + "\n"


def read_history(path: Path) -> History:
    """Read a history. Raises `ConfigError`, which names the file and what is wrong in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"history {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"history {path} is no JSON: wanted a history or a recording") from error
    try:
        return _history(found)
    except ValueError as error:
        raise ConfigError(f"history {path}: {error}") from error


def _history(found: object) -> History:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"wanted an object with format {FORMAT}")
    missing = {"seed", "shape", "requests", "faults"} - found.keys()
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    requests, faults = found["requests"], found["faults"]
    if not isinstance(requests, list) or not isinstance(faults, list):
        raise ValueError("requests and faults: wanted lists")
    if type(found["seed"]) is not int:
        raise ValueError("seed: wanted a whole number")
    if len(requests) > MOST_REQUESTS:
        raise ValueError(f"{len(requests)} requests: wanted at most {MOST_REQUESTS}")
    history = History(
        seed=found["seed"],
        shape=_shape(found["shape"]),
        requests=tuple(
            AskedRequest(**_fields_of(AskedRequest, one, f"request {i}"))
            for i, one in enumerate(requests)
        ),
        faults=tuple(_fault(one, f"fault {i}") for i, one in enumerate(faults)),
    )
    _check(history)
    return history


def _shape(found: object) -> Shape:
    values = _fields_of(Shape, found, "shape")
    return Shape(**{**values, "pools": tuple(values["pools"])})


def _fault(found: object, where: str) -> Fault:
    values = _fields_of(Fault, found, where)
    try:
        values["kind"] = kind = FaultKind(values["kind"])
    except ValueError:
        known = ", ".join(one.value for one in FaultKind)
        raise ValueError(f"{where}: kind is {values['kind']!r}: wanted one of {known}") from None
    if values["how"] not in WAYS[kind]:
        known = ", ".join(WAYS[kind])
        raise ValueError(f"{where}: how is {values['how']!r}: wanted one of {known or 'nothing'}")
    return Fault(**values)


def _fields_of(kind: type[Any], found: object, where: str) -> dict[str, Any]:
    types = {one.name: str(one.type) for one in fields(kind)}
    if not isinstance(found, dict) or found.keys() != types.keys():
        raise ValueError(f"{where}: wanted an object with {', '.join(types)}")
    for name, value in found.items():
        if not _is_of(value, types[name]):
            raise ValueError(f"{where}: {name} is {value!r}: wanted {types[name]}, 0 or more")
    return dict(found)


def _is_of(value: object, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if kind in ("str", "FaultKind"):
        return isinstance(value, str)
    if kind == "tuple[int, ...]":
        return isinstance(value, list) and all(_is_of(one, "int") for one in value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return type(value) is int and abs(value) < 1 << 63
    return type(value) in (int, float) and 0 <= value <= MOST_SECONDS  # type: ignore[operator]


def _check(history: History) -> None:
    """Raise `ValueError` for a history that no cluster can run."""
    shape = history.shape
    problems = dict.fromkeys(problems_of(shape))  # each once, though it holds for every role
    if problems:
        raise ValueError("; ".join(problems))
    most_tokens = MOST_BLOCKS * shape.block_size
    for asked in history.requests:
        if not 1 <= asked.num_prompt <= most_tokens - asked.max_tokens or asked.max_tokens < 1:
            raise ValueError(f"{asked.name}: wanted 2 to {most_tokens} tokens, 1 or more of each")
        if asked.deadline_s <= 0:
            raise ValueError(f"{asked.name}: deadline_s is {asked.deadline_s}: wanted more than 0")
    routers = router_names(shape)
    for asked in history.requests:
        if asked.router not in routers:
            raise ValueError(f"{asked.name}: router is {asked.router!r}: wanted one of {routers}")
    names = [*node_names(shape), *routers]
    for fault in history.faults:
        for name in (fault.target, fault.other):
            if name and name not in (*names, STORE):
                raise ValueError(f"nothing is called {name!r}: wanted one of {', '.join(names)}")
        if fault.kind in CHANGES and (fault.target in routers or fault.other not in routers):
            raise ValueError(f"a {fault.kind.value}: wanted a node, and in other a router")
    for asked in history.requests:
        if asked.grammar and asked.grammar not in GRAMMARS:
            known = ", ".join(GRAMMARS)
            raise ValueError(f"{asked.name}: grammar is {asked.grammar!r}: wanted one of {known}")
    if len({one.name for one in history.requests}) < len(history.requests):
        raise ValueError("two requests have one name")
