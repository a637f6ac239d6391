"""`pdserve drain`: ask a node to leave, and watch it go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from common.clock import Clock
from common.errors import PdserveError
from pdserve.commands.cluster_status import Facts, fetch_cluster
from pdserve.commands.http_client import RouterUnreachable, decoded, opened

PATH = "/v1/cluster/drain"
POLL_S = 0.5
SPARE_S = 20.0
"""Behind the node's own time-out: its last acknowledgements, and the router's next look."""

_CALL_TIMEOUT_S = 10.0
_LARGEST_REPLY_BYTES = 64 << 10


class DrainFailed(PdserveError):
    """The node is still there, long after its time."""

    code = "drain_failed"


@dataclass(frozen=True, slots=True)
class LeavingNode:
    """A node that was asked to leave, in the life it has, and how long it gives what runs."""

    node_id: str
    epoch: int
    timeout_s: float


def ask_to_leave(url: str, node_id: str, *, api_key: str = "") -> LeavingNode:
    """Ask the router at `url` to drain a node. Raises `RouterUnreachable` or `RouterRefused`."""
    url = url.rstrip("/")
    with opened(
        url,
        "POST",
        PATH,
        body={"node_id": node_id},
        api_key=api_key,
        timeout_s=_CALL_TIMEOUT_S,
    ) as response:
        reply = decoded(url, PATH, response.read(_LARGEST_REPLY_BYTES))
    try:
        return LeavingNode(node_id, int(reply["epoch"]), float(reply["drain_timeout_s"]))
    except (KeyError, TypeError, ValueError):
        raise RouterUnreachable(
            f"{url}{PATH}: an answer without a time: no pdserve router?"
        ) from None


def wait_until_gone(
    url: str,
    leaving: LeavingNode,
    clock: Clock,
    *,
    api_key: str = "",
    pause: Callable[[float], object],
) -> float:
    """Return how many seconds it took until the router lists this life of the node no more.

    What it still holds is said on stderr whenever that changes. Raises `DrainFailed` when it stays,
    `RouterUnreachable` or `RouterRefused` when nobody can say.
    """
    began_at_s = clock.now_s()
    last_said = ""
    while True:
        node = _listed(url, leaving, api_key)
        took_s = clock.now_s() - began_at_s
        if node is None:
            return took_s
        if took_s > leaving.timeout_s + SPARE_S:
            raise DrainFailed(
                f"{leaving.node_id} is still listed after {took_s:.0f} s, "
                f"{leaving.timeout_s:g} s of which were its own to finish: see its log"
            )
        said = f"{node.get('num_running', 0)} running, {node.get('num_waiting', 0)} waiting"
        if said != last_said:
            print(f"{leaving.node_id}: {said}", file=sys.stderr, flush=True)
            last_said = said
        pause(POLL_S)


def _listed(url: str, leaving: LeavingNode, api_key: str) -> Facts | None:
    nodes = fetch_cluster(url, api_key=api_key).nodes
    lives = [node for node in nodes if node["node_id"] == leaving.node_id]
    return next((node for node in lives if node.get("epoch") == leaving.epoch), None)
