"""The errors that cross a boundary, each with a stable name.

PdserveError
├── ConfigError            a setting is wrong; nothing was started
├── CheckpointError        a model folder is missing, broken or not supported
├── InvalidRequest         the caller's fault: never retried, never charged to a node
├── Overloaded             no room now; `retry_after_s` says when to come back
├── PoolExhausted          a running request needs more KV blocks than its node can ever give it
├── DeadlineExceeded       the request's own deadline passed
├── NodeLost               a node that held the request died or left
│   └── Draining           it takes nothing new, and hands over what it cannot finish
├── StaleEpoch             a message for, or from, an earlier life of a process
├── HandoffFailed          KV did not arrive whole and true on the decode node
│   ├── LayoutMismatch     the two sides' caches have different shapes
│   └── PeerProtocolError  the peer sent what this protocol does not allow
└── InternalError          a bug: the request ends, the process goes on
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of every typed error. `code` is what travels on the wire and what metrics count."""

    code = "internal_error"


class ConfigError(PdserveError):
    """A setting is wrong; the text names key, value and what was wanted."""

    code = "config_error"


class CheckpointError(PdserveError):
    """A checkpoint is missing, truncated, of another shape, or of an unsupported architecture."""

    code = "checkpoint_error"


class InvalidRequest(PdserveError):
    """The request cannot be served as asked. `param` names the field at fault, where one is."""

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


class PoolExhausted(PdserveError):
    """The only request that still decodes cannot grow: nothing is left to evict or to preempt.

    What was answered before stays answered.
    """

    code = "pool_exhausted"


class DeadlineExceeded(PdserveError):
    """The request's one deadline, set at the router, has passed."""

    code = "deadline_exceeded"


class NodeLost(PdserveError):
    """A node holding part of the request is gone."""

    code = "node_lost"


class Draining(NodeLost):
    """A node is leaving: it refuses what is new, or gives back what it could not finish in time."""

    code = "draining"


class StaleEpoch(PdserveError):
    """A message names another incarnation of its sender or receiver."""

    code = "stale_epoch"


class HandoffFailed(PdserveError):
    """KV did not arrive whole and true: the attempt is over, and nothing false was said."""

    code = "handoff_failed"


class LayoutMismatch(HandoffFailed):
    """Two KV caches that cannot exchange blocks; the text names both sides' values."""

    code = "layout_mismatch"


class PeerProtocolError(HandoffFailed):
    """A peer broke the protocol: wrong version, oversized or malformed frame."""

    code = "peer_protocol_error"


class InternalError(PdserveError):
    """Something that should be impossible happened to this one request."""

    code = "internal_error"


def error_from_code(code: str, message: str) -> PdserveError:
    """The typed error for a code read off the wire; an unknown code becomes `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message)


def _subclasses(cls: type[PdserveError]) -> list[type[PdserveError]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _subclasses(c))]


_BY_CODE: dict[str, type[PdserveError]] = {
    c.code: c for c in _subclasses(PdserveError) if c is not PdserveError
}
