"""The errors that cross a boundary, each with a stable name.

PdserveError
├── ConfigError            a setting is wrong; nothing was started
├── CheckpointError        a model folder is missing, broken or not supported
├── InvalidRequest         the caller's fault: never retried, never counted against a node
├── Overloaded             no room now; `retry_after_s` says when to try again
│   └── DeadlineUnreachable  the queue is too long for the request's own deadline
├── PoolExhausted          a running request needs more KV blocks than its node can ever give it
├── DeadlineExceeded       the request's own deadline passed
├── NodeLost               a node that held the request died or left
│   └── Draining           the node leaves: it takes no new requests and hands over the others
├── StaleEpoch             a message for, or from, an earlier life of a process
├── LastInRole             without the node no other one would do what it does: it keeps its role
├── PlacementUnavailable   the placement store did not answer in time
├── HandoffFailed          KV did not arrive complete and correct on the decode node
│   ├── LayoutMismatch     the two sides' caches have different shapes
│   └── PeerProtocolError  the peer sent something that the protocol does not allow
└── InternalError          a bug: the request ends, the process goes on
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of every typed error. `code` names it in messages between nodes and in metrics."""

    code = "internal_error"


class ConfigError(PdserveError):
    """A setting is wrong; the text names key, value and what was wanted."""

    code = "config_error"


class CheckpointError(PdserveError):
    """A checkpoint is missing, truncated, of another shape, or of an unsupported architecture."""

    code = "checkpoint_error"


class InvalidRequest(PdserveError):
    """The request cannot be served as it is. `param` names the wrong field, if there is one."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(PdserveError):
    """Nothing has room for the request now."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineUnreachable(Overloaded):
    """The request would end after its deadline: it was not queued, to make no other one late."""

    code = "deadline_unreachable"


class PoolExhausted(PdserveError):
    """The only request that still decodes cannot grow: nothing is left to evict or to preempt.

    The tokens that it has sent so far stay valid.
    """

    code = "pool_exhausted"


class DeadlineExceeded(PdserveError):
    """The request's deadline, which the router sets, has passed."""

    code = "deadline_exceeded"


class NodeLost(PdserveError):
    """A node holding part of the request is gone."""

    code = "node_lost"


class Draining(NodeLost):
    """A node is leaving: it refuses new requests, or gives back those that it could not finish."""

    code = "draining"


class StaleEpoch(PdserveError):
    """A message names another incarnation of its sender or receiver."""

    code = "stale_epoch"


class LastInRole(PdserveError):
    """No other node is certain to do what this one does: it keeps its role."""

    code = "last_in_role"


class PlacementUnavailable(PdserveError):
    """The placement store did not answer in time; the caller continues with its present state."""

    code = "placement_unavailable"


class HandoffFailed(PdserveError):
    """KV did not arrive complete and correct: the attempt ended before a wrong token was sent."""

    code = "handoff_failed"


class LayoutMismatch(HandoffFailed):
    """Two KV caches cannot exchange blocks; the text names the values of both sides."""

    code = "layout_mismatch"


class PeerProtocolError(HandoffFailed):
    """A peer broke the protocol: wrong version, oversized or malformed frame."""

    code = "peer_protocol_error"


class InternalError(PdserveError):
    """A bug ended this request; the process goes on."""

    code = "internal_error"


def error_from_code(code: str, message: str) -> PdserveError:
    """Return the typed error for a received code; an unknown code gives `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message)


def _subclasses(cls: type[PdserveError]) -> list[type[PdserveError]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _subclasses(c))]


_BY_CODE: dict[str, type[PdserveError]] = {
    c.code: c for c in _subclasses(PdserveError) if c is not PdserveError
}
