"""The output of `pdserve up`: while nodes start, when all serve, when a process has ended."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdserve.local_cluster.child_process import ChildProcess, described_exit

_TIMESTAMP = re.compile(r"^[0-9-]+ [0-9:,]+ ")
_COMPILED = re.compile(r"compiled ([0-9]{1,6}) of about ([0-9]{1,6}) CPU kernels")
_IF_KILLED = (
    "\nIf nobody killed it, memory ran out: fewer nodes, or a smaller memory_fraction or "
    "kv_cache_memory, take less."
)
_MOST_CHARS = 100
_TAIL_LINES = 20


def compiled_kernels(tails: Iterable[Sequence[str]]) -> str:
    """Return how many kernels all nodes have compiled, "" where none has compiled any.

    `tails` are the last lines of each node's log. Nodes that start together divide the kernels;
    a few small ones each of them compiles.
    """
    counts = [_last_count(lines) for lines in tails]
    num_compiled = sum(compiled for compiled, _ in counts)
    total = max((total for _, total in counts), default=0)
    if not num_compiled:
        return ""
    return f"{min(num_compiled, total)} of about {total} compiled, once on this machine"


def last_words(tail: Sequence[str]) -> str:
    """Return the last line of a log without its time, "" of an empty one."""
    return _TIMESTAMP.sub("", tail[-1])[:_MOST_CHARS] if tail else ""


def _last_count(lines: Sequence[str]) -> tuple[int, int]:
    for line in reversed(lines):
        if found := _COMPILED.search(line):
            return int(found[1]), int(found[2])
    return 0, 0


def first_lines(url: str, command: str) -> str:
    """Return the addresses of a cluster and the commands about it; `command` runs pdserve."""
    return (
        f"Serving on {url} until Ctrl-C.\n"
        f"  live page  {url}/\n"
        f"  API        {url}/docs\n"
        f"  metrics    {url}/metrics\n"
        f"  status     {command} status --url {url}\n"
        f"  chat       {command} chat --url {url}"
    )


def command_name() -> str:
    """Return how this shell runs pdserve: by its name, or by the path of its environment."""
    if shutil.which("pdserve"):
        return "pdserve"
    script = Path(sys.executable).with_name("pdserve")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m pdserve"
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return shlex.quote(os.fspath(shown))


def obituary(child: ChildProcess, code: int) -> str:
    """Return how a process died, and the end of its log."""
    tail = "".join(f"\n  | {line}" for line in child.log_tail(_TAIL_LINES))
    hint = _IF_KILLED if code == -signal.SIGKILL else ""
    return f"{child.name} died ({described_exit(code)}); the end of {child.log_path}:{tail}{hint}"


def what_now(name: str, nodes: Sequence[str], restart: str) -> str:
    """Return what is left without the process `name`, and how it comes back.

    `nodes` are those that run; `restart` says that this one is started again, "" that it is not.
    """
    if name == "redis":
        return (
            "The nodes that run serve on, but none can join. "
            "To get Redis back, press Ctrl-C and run `pdserve up` again."
        )
    again = restart or f"To get {name} back, press Ctrl-C and run `pdserve up` again."
    if not nodes:
        return f"No node is left: requests are not answered. {again}"
    can_answer = any(node.startswith(("decode", "mixed")) for node in nodes)
    serves = "serves on" if len(nodes) == 1 else "serve on"
    return f"Left: {', '.join(nodes)}, which {serves if can_answer else 'cannot answer'}. {again}"
