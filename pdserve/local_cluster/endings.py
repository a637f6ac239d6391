"""What `pdserve up` says when one of its processes has ended."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.local_cluster.child_process import ChildProcess, described_exit

_TAIL_LINES = 20


def obituary(child: ChildProcess, code: int) -> str:
    """Return how a process died, and the end of its log."""
    tail = "".join(f"\n  | {line}" for line in child.log_tail(_TAIL_LINES))
    return f"{child.name} died ({described_exit(code)}); the end of {child.log_path}:{tail}"


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
