"""`pdserve drain`: ask a node to leave, and watch it go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import PdserveError
from common.observing.clock import Clock
from pdserve.commands.cluster_status import Facts, fetch_cluster
from pdserve.commands.http_client import RouterUnreachable, decoded, opened
from pdserve.commands.node_name import require_node_id

PATH = "/v1/cluster/drain"
POLL_S = 0.5
SPARE_S = 20.0
"""Added to the node's own timeout: for its last acknowledgements and the router's next poll."""

_CALL_TIMEOUT_S = 10.0
_LARGEST_REPLY_BYTES = 64 << 10


class DrainFailed(PdserveError):
    """The node is still listed, long after its timeout."""

    code = "drain_failed"


@dataclass(frozen=True, slots=True)
class LeavingNode:
    """A node that was asked to leave: its epoch, and the time that it gives to running requests."""

    node_id: str
    epoch: int
    timeout_s: float


def ask_to_leave(url: str, node_id: str, *, api_key: str) -> LeavingNode:
    """Ask the router at `url` to drain a node.

    Raises `ConfigError` for the name of no node, and `RouterUnreachable` or `RouterRefused`.
    """
    require_node_id(node_id)
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
    """Return the seconds until the router does not list this epoch of the node any more.

    The number of its requests is printed on stderr whenever it changes. Raises `DrainFailed` when
    the node stays, `RouterUnreachable` or `RouterRefused` when the router does not answer.
    """
    began_at_s = clock.now_s()
    last_shown = ""
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
        shown = f"{node.get('num_running', 0)} running, {node.get('num_waiting', 0)} waiting"
        if shown != last_shown:
            print(f"{leaving.node_id}: {shown}", file=sys.stderr, flush=True)
            last_shown = shown
        pause(POLL_S)


def _listed(url: str, leaving: LeavingNode, api_key: str) -> Facts | None:
    nodes = fetch_cluster(url, api_key=api_key).nodes
    lives = [node for node in nodes if node["node_id"] == leaving.node_id]
    return next((node for node in lives if node.get("epoch") == leaving.epoch), None)
