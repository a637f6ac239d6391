"""What the client of a node tells its owner, and whom it hands the outputs of the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.ids import Incarnation
from common.request import RequestOutput
from protos import pdserve_node_pb2 as pb
from router.core.known.block_reports import BlockReport

OnOutputs = Callable[[Incarnation, Sequence[RequestOutput]], None]
"""Takes outputs in the node's order, after `on_heard`."""


class NodeListener(Protocol):
    """Receives what the stream brings but outputs: called on the event loop, returns at once."""

    @property
    def num_running(self) -> int:
        """Requests in progress, on whatever node."""

    def on_heard(self, node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
        """Handle a message, with outputs or without (a heartbeat).

        `stuck_s`: how long the node's step has lasted, if it makes no progress; 0 otherwise.
        `is_reached`: as far as is known, the node has what was sent to it.
        """

    def on_blocks(self, node: Incarnation, report: BlockReport) -> None:
        """Take blocks that entered or left the node's prefix cache."""

    def on_for_others(self, node: Incarnation, message: pb.NodeMessage) -> None:
        """Take a message for what it has for other nodes, after its outputs."""

    def on_suspected(self, node: Incarnation, reason: str, *, is_heard: bool) -> None:
        """Take the suspicion that a node which was heard is gone, or `is_heard` and not reached.

        It may come again, and is ended by `on_heard` or `on_lost`.
        """

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """Take the end of a stream that was heard: `ENDED_BY_NODE`, or the fault."""
