"""`pdserve simulate`: runs histories with faults; shortens a wrong one, and writes it to a file.

What a file is replayed as, a history or a recording, says the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from common.control_group import num_cores
from common.errors import ConfigError
from common.observing.clock import Clock, MonotonicClock
from common.recording.file import is_recording
from pdserve.configuration.config_sources import SettingsError
from pdserve.configuration.option_values import count_from_text
from pdserve.simulating.on_all_cores import wrong_histories_in_processes
from pdserve.simulating.replay_command import run_replay
from simulator.faults.cluster import run_history
from simulator.faults.drawing import Wishes
from simulator.faults.history import (
    MOST_REQUESTS,
    AskedRequest,
    History,
    read_history,
    to_json,
)
from simulator.faults.kinds import FaultKind
from simulator.faults.search import WrongHistory, quiet, shortened, wrong_histories
from simulator.faults.shape import MOST_NODES, Shape

MOST_HISTORIES = 1_000_000_000
MOST_PROCESSES = 1000
HISTORIES_PER_PROCESS = 20
"""Fewer do not pay for the start of a process."""
PROGRESS_S = 5.0
_ALL, _NONE = "all", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The histories to run: those from `seed` on, or the one of a file."""

    seed: int
    num_histories: int
    num_processes: int
    wishes: Wishes
    replayed: Path | None
    is_json: bool
    written_to: Path


def simulation_of(flags: Mapping[str, Any]) -> Simulation:
    """Return what the flags ask for. Raises `SettingsError`, which names all that is wrong."""
    problems = _ignored_by_replay(flags)
    seed = _number(flags, "seed", 0, (0, 1 << 62), problems)
    num_histories = _number(flags, "histories", 100, (1, MOST_HISTORIES), problems)
    num_requests = _number(flags, "requests", 20, (1, MOST_REQUESTS), problems)
    num_processes = _number(flags, "processes", num_cores(), (1, MOST_PROCESSES), problems)
    kinds = _kinds(str(flags.get("faults", _ALL)), problems)
    nodes = _nodes(flags.get("nodes"), problems)
    replayed = flags.get("replay")
    written_to = Path(str(flags.get("output", "wrong-history.json")))
    if written_to.is_dir() or not written_to.parent.is_dir():
        problems.append(f"--output is {str(written_to)!r}: wanted a file in a folder that exists")
    if not __debug__:
        problems.append("PYTHONOPTIMIZE, or -O of Python, leaves out checks: wanted neither")
    if problems:
        raise SettingsError(problems)
    wishes = Wishes(
        kinds=kinds, num_requests=num_requests, num_prefill=nodes[0], num_decode=nodes[1]
    )
    return Simulation(
        seed=seed,
        num_histories=num_histories,
        num_processes=num_processes,
        wishes=wishes,
        replayed=None if replayed is None else Path(str(replayed)),
        is_json=bool(flags.get("json")),
        written_to=written_to,
    )


def _ignored_by_replay(flags: Mapping[str, Any]) -> list[str]:
    """Return one problem that names the flags which a file leaves no choice of."""
    names = ("seed", "histories", "processes", "faults", "requests", "nodes", "output")
    ignored = [f"--{name}" for name in names if name in flags]
    if "replay" not in flags or not ignored:
        return []
    return [f"--replay runs what is in a file as it is: wanted no {', '.join(ignored)}"]


def run_simulation(
    wanted: Simulation,
    out: TextIO | None = None,
    clock: Clock | None = None,
    run: Callable[[History], str] = run_history,
) -> bool:
    """Run the histories; return whether none was wrong, or no decision of a recording another one.

    Raises `ConfigError` where a file cannot be read or written.
    """
    out = out or sys.stdout
    if wanted.replayed is not None and is_recording(wanted.replayed):
        return run_replay(wanted.replayed, out, is_json=wanted.is_json)
    with quiet():
        if wanted.replayed is not None:
            history = read_history(wanted.replayed)
            wrong = run(history)
            _say(wanted, out, history, wrong, num_histories=1)
            return not wrong
        found, num_run = _search(wanted, out, clock or MonotonicClock(), run)
        if found is None:
            _say(wanted, out, None, "", num_histories=num_run)
            return True
        if not wanted.is_json:
            history = found.history
            where = f"seed {history.seed}, lane {history.shape.lane}"
            print(f"{where}: {found.wrong}", file=out)
            print(f"{len(found.history)} requests and faults; it is shortened", file=out)
            out.flush()
        history, wrong = shortened(found.history, found.wrong, run)
    # Told first: what was found is not lost with a disk that is full.
    _say(wanted, out, history, wrong, num_histories=num_run)
    try:
        wanted.written_to.write_text(to_json(history), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{wanted.written_to} cannot be written: {error.strerror}") from error
    return False


def _search(
    wanted: Simulation, out: TextIO, clock: Clock, run: Callable[[History], str]
) -> tuple[WrongHistory | None, int]:
    began_s = told_s = clock.now_s()
    number = 0
    for number, found in enumerate(_found(wanted, run), 1):
        if found is not None:
            return found, number
        now_s = clock.now_s()
        if now_s - told_s >= PROGRESS_S and not wanted.is_json:
            told_s = now_s
            rate = number / (now_s - began_s)
            print(f"{number} histories, none is wrong; {rate:.1f} a second", file=out, flush=True)
    return None, number


def _found(wanted: Simulation, run: Callable[[History], str]) -> Iterator[WrongHistory | None]:
    seeds = range(wanted.seed, wanted.seed + wanted.num_histories)
    num_processes = min(wanted.num_processes, len(seeds) // HISTORIES_PER_PROCESS)
    if num_processes < 2:
        return wrong_histories(seeds, wanted.wishes, run)
    return wrong_histories_in_processes(seeds, wanted.wishes, num_processes)


def _say(
    wanted: Simulation, out: TextIO, history: History | None, wrong: str, *, num_histories: int
) -> None:
    """Print the result: of a wrong history what happens in it, line by line."""
    path = wanted.replayed or wanted.written_to
    if wanted.is_json:
        found: dict[str, Any] = {"histories": num_histories, "wrong": wrong}
        if history is not None:
            found |= {"seed": history.seed, "history": json.loads(to_json(history))}
        print(json.dumps(found), file=out)
        return
    if not wrong or history is None:
        print(f"{num_histories} histories, none is wrong", file=out)
        return
    print(f"wrong: {wrong}", file=out)
    for line in lines_of(history):
        print(f"  {line}", file=out)
    print(f"run it again: pdserve simulate --replay {path}", file=out)


def lines_of(history: History) -> list[str]:
    """Return what happens in a history, in the order of time."""
    shape = history.shape
    of_many = ", as of a wide cluster" if shape.is_wide else ""
    lines = [
        (
            -1.0,
            f"nodes: {shape.num_prefill} prefill, {shape.num_decode} decode, "
            f"{shape.num_mixed} mixed, of {_pools(shape)} blocks and {shape.max_num_seqs} "
            f"seats; at most {shape.max_queued} wait on one; {shape.num_routers} routers{of_many}",
        )
    ]
    for asked in history.requests:
        leaves = "" if asked.leaves_at_s is None else f", leaves at {asked.leaves_at_s:g} s"
        lines.append(
            (
                asked.at_s,
                f"{asked.at_s:8.4f} s  {asked.name} to {asked.router}: {asked.num_prompt} tokens, "
                f"at most {asked.max_tokens} more, priority {asked.priority}, within "
                f"{asked.deadline_s:g} s{_demands(asked)}{leaves}",
            )
        )
    for fault in history.faults:
        between = f" and {fault.other}" if fault.other else ""
        how = f", {fault.how}" if fault.how else ""
        span = f", for {fault.span_s:g} s" if fault.span_s else ""
        what = f"{fault.kind.value} of {fault.target}{between}{how}{span}"
        lines.append((fault.at_s, f"{fault.at_s:8.4f} s  {what}"))
    return [line for _, line in sorted(lines)]


def _demands(asked: AskedRequest) -> str:
    cut = ", cut to what its node holds" if asked.is_cut else ""
    salt = f", salt {asked.salt}" if asked.salt else ""
    grammar = f", grammar {asked.grammar}" if asked.grammar else ""
    scores = ", with log probabilities" if asked.has_logprobs or asked.has_prompt_logprobs else ""
    return f"{cut}{salt}{grammar}{scores}"


def _pools(shape: Shape) -> str:
    return ", ".join(map(str, shape.pools)) or str(shape.num_blocks)


def _number(
    flags: Mapping[str, Any], name: str, default: int, between: tuple[int, int], wrong: list[str]
) -> int:
    text = str(flags.get(name, default))
    count, (least, most) = count_from_text(text), between
    if count is not None and least <= count <= most:
        return count
    wrong.append(f"--{name} is {text!r}: wanted a whole number from {least} to {most}")
    return default


def _kinds(text: str, wrong: list[str]) -> tuple[FaultKind, ...]:
    if text == _ALL:
        return tuple(FaultKind)
    if text == _NONE:
        return ()
    known = {kind.value: kind for kind in FaultKind}
    names = text.split(",")
    if any(name not in known for name in names):
        wrong.append(
            f"--faults is {text!r}: wanted {_ALL}, {_NONE}, or some of "
            f"{', '.join(known)}, with commas between them"
        )
        return ()
    return tuple(known[name] for name in dict.fromkeys(names))


def _nodes(text: object, wrong: list[str]) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match [count_from_text(one) for one in str(text).split(":")]:
        case [int(num_prefill), int(num_decode)] if num_decode:
            if num_prefill + num_decode <= MOST_NODES:
                return num_prefill, num_decode
    wrong.append(
        f"--nodes is {text!r}: wanted P:D, such as 1:2, with D at least 1 and "
        f"{MOST_NODES} nodes at most"
    )
    return None, None
