"""How a transfer can fail on the sender's side, where that is counted apart.

To other nodes all of them are `HandoffFailed`, with its code: earlier releases know no others.
"""

from __future__ import annotations

from common.errors import HandoffFailed, PdserveError, error_from_code
from kv_transfer.contract import Revoked
from kv_transfer.wire.frames import LEASE_REVOKED


class PeerUnreachable(HandoffFailed):
    """The decode node's KV port does not answer, or did not lately."""


class TransferSlow(HandoffFailed):
    """The bytes take much longer than on other links: another decode node is the better one."""


class TransferAborted(HandoffFailed):
    """The transfer's own node gave it up."""


def error_of_peer(code: str, message: str) -> HandoffFailed:
    """Return the error that a decode node reported."""
    if code == LEASE_REVOKED:
        return Revoked(message)
    error: PdserveError = error_from_code(code, message)
    return error if isinstance(error, HandoffFailed) else HandoffFailed(f"{code}: {message}")
