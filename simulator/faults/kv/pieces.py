"""What becomes of the pieces of transfers, counted where they are."""

from __future__ import annotations

from collections import Counter

from common.errors import InternalError
from common.ids import Incarnation
from kv_transfer.sending.machine import Sender


def check_pieces(me: Incarnation, sender: Sender) -> None:
    """Check that each pushed piece is acknowledged, on its way or about to be sent.

    One that is lost would end its transfer with an error alone, which breaks may do too. Raises
    `InternalError`.
    """
    for link in sender.links.all():
        under_way: Counter[int] = Counter()
        for channel in link.channels:
            for flight in channel._in_flight:
                under_way[flight.transfer.token] += len(flight.chunk)
        for token, transfer in link.transfers.items():
            left = transfer._pushed.count - transfer._num_acknowledged
            found = under_way[token] + sum(map(len, transfer.pending))
            if found != left and not transfer.is_stopped:
                raise InternalError(
                    f"{me} has {found} pieces of a transfer to send or under way, and {left} are "
                    "not acknowledged"
                )
