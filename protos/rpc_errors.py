"""Typed errors as gRPC statuses, for the calls whose reply has no field for a refusal."""

from __future__ import annotations

import grpc

from common.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    StaleEpoch,
)

# A subclass comes before its base: the first match counts.
_STATUS: tuple[tuple[type[PdserveError], grpc.StatusCode], ...] = (
    (StaleEpoch, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (NodeLost, grpc.StatusCode.UNAVAILABLE),
    (HandoffFailed, grpc.StatusCode.ABORTED),
)


def status_of(error: PdserveError) -> grpc.StatusCode:
    """Return the status with which a servicer aborts a call."""
    return next(
        (status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )


def error_of(status: grpc.StatusCode, details: str) -> PdserveError:
    """Return the typed error of a failed call.

    A call that did not reach its peer is `NodeLost`. One without an answer in time is
    `DeadlineExceeded`, as a call may take all the time that its request has left.
    """
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(details)
    if status is grpc.StatusCode.FAILED_PRECONDITION:
        return StaleEpoch(details)
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(details)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return PeerProtocolError(f"the peer does not speak this protocol: {details}")
    if status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return InternalError(details)
    return NodeLost(f"{status.name}: {details}")
