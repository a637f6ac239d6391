"""An ended attempt as spans, from times that the node records in any case.

    prefill            the call came … token 0         on the node that computed the prompt
    ├── queue          the call came … its first step
    └── compute        its first step … token 0, in so many chunks
    kv transfer        first chunk sent … commit acknowledged, on the prefill node
    └── exposed        end of the prefill … commit acknowledged: decode waits for it
    decode             KV landed, or token 0 … last token; all of an answer continued here
    landing            the call came … the end, when no KV came

All of them are children of the router's span for the attempt.
"""

from __future__ import annotations

from common.observing.tracing import Attributes, Span, Tracing
from common.request import FinishReason
from node.flow.attempts.attempt_table import HANDED_OFF, NodeAttempt

_GOOD_ENDS = frozenset(
    {FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.ABORT.value, HANDED_OFF}
)


def record_attempt(tracing: Tracing, attempt: NodeAttempt, ended_at_s: float) -> None:
    """Make the spans of an attempt that is traced and was removed from the node's table."""
    error = "" if attempt.outcome in _GOOD_ENDS else attempt.outcome
    if attempt.landed_at_s is not None:
        _decode(tracing, attempt, attempt.landed_at_s, ended_at_s, error)
    elif attempt.sequence.has_remote_kv:
        span = _span(tracing, attempt, "landing", attempt.received_at_s)
        span.end(ended_at_s, error=error)
    elif attempt.sequence.request.output_token_ids and not attempt.sequence.is_exported:
        _decode(
            tracing, attempt, attempt.computing_since_s or attempt.received_at_s, ended_at_s, error
        )
    else:
        _prefill(tracing, attempt, ended_at_s, error)


def _prefill(tracing: Tracing, attempt: NodeAttempt, ended_at_s: float, error: str) -> None:
    computing_at_s, token_at_s = attempt.computing_since_s, attempt.first_token_at_s
    span = _span(tracing, attempt, "prefill", attempt.received_at_s)
    queue = span.child("queue", attempt.received_at_s)
    queue.end(ended_at_s if computing_at_s is None else computing_at_s)
    if computing_at_s is not None:
        compute = span.child("compute", computing_at_s)
        compute.set({"pdserve.chunks": attempt.num_chunks})
        compute.end(ended_at_s if token_at_s is None else token_at_s)
    span.set({"pdserve.prompt_tokens": attempt.sequence.num_prompt})
    if token_at_s is None:
        span.end(ended_at_s, error=error)
        return
    span.end(token_at_s)
    if attempt.sequence.is_exported:
        _transfer(tracing, attempt, token_at_s, ended_at_s, error)
    else:
        _decode(tracing, attempt, token_at_s, ended_at_s, error)


def _transfer(
    tracing: Tracing, attempt: NodeAttempt, token_at_s: float, ended_at_s: float, error: str
) -> None:
    timing = attempt.transfer
    if timing is None:
        span = _span(tracing, attempt, "kv transfer", token_at_s)
        span.end(ended_at_s, error=error)
        return
    span = _span(tracing, attempt, "kv transfer", timing.first_sent_at_s)
    span.set(
        {
            "pdserve.kv.transport": timing.lane,
            "pdserve.kv.bytes": timing.num_bytes,
            "pdserve.kv.hidden_bytes": timing.bytes_hidden,
            "pdserve.kv.exposed_s": timing.exposed_s,
        }
    )
    exposed = span.child("exposed", timing.committed_at_s)
    exposed.end(timing.ended_at_s)
    span.end(timing.ended_at_s, error=error)


def _decode(
    tracing: Tracing, attempt: NodeAttempt, began_at_s: float, ended_at_s: float, error: str
) -> None:
    sequence = attempt.sequence
    span = _span(tracing, attempt, "decode", began_at_s)
    span.set(
        {
            "gen_ai.usage.output_tokens": sequence.num_output,
            "pdserve.drafted_tokens": sequence.num_drafted,
            "pdserve.accepted_tokens": sequence.num_accepted_drafts,
        }
    )
    span.end(ended_at_s, error=error)


def _span(tracing: Tracing, attempt: NodeAttempt, name: str, began_at_s: float) -> Span:
    span = tracing.span(name, began_at_s, parent=attempt.sequence.request.traceparent)
    span.set(_of(attempt))
    return span


def _of(attempt: NodeAttempt) -> Attributes:
    """Return what every span of an attempt says: of it, and of what was cached of its prompt."""
    sequence = attempt.sequence
    num_below = sequence.num_host_tokens + sequence.num_disk_tokens
    num_in_pool = sequence.num_cached_tokens - num_below
    # What was pulled may be evicted again before the prompt is admitted.
    num_pulled = min(attempt.num_pulled_tokens, num_in_pool)
    return {
        "pdserve.choice_id": attempt.id.choice_id,
        "pdserve.attempt": attempt.id.attempt,
        "pdserve.outcome": attempt.outcome,
        "pdserve.cached_tokens": sequence.num_cached_tokens,
        "pdserve.cached_tokens.pool": num_in_pool - num_pulled,
        "pdserve.cached_tokens.host": sequence.num_host_tokens,
        "pdserve.cached_tokens.disk": sequence.num_disk_tokens,
        "pdserve.cached_tokens.pulled": num_pulled,
    }
