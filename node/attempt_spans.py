"""An ended attempt as spans, from times that the node keeps anyway.

    prefill            the call came … token 0         on whoever computed the prompt
    ├── queue          the call came … its first step
    └── compute        its first step … token 0, in so many chunks
    kv transfer        first chunk sent … commit acknowledged, on the prefill node
    └── exposed        end of the prefill … commit acknowledged: what decode waits for
    decode             KV landed, or token 0 … last token; of an answer that goes on here, all
    landing            the call came … the end, when no KV came

All of them are children of the router's span for the attempt.
"""

from __future__ import annotations

from common.request import FinishReason
from common.tracing import Attributes, Span, Tracing
from node.request_book import HANDED_OFF, Held

_GOOD_ENDS = frozenset(
    {FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.ABORT.value, HANDED_OFF}
)


def record_attempt(tracing: Tracing, held: Held, ended_at_s: float) -> None:
    """Make the spans of an attempt that is traced and was removed from the node's book."""
    error = "" if held.outcome in _GOOD_ENDS else held.outcome
    if held.landed_at_s is not None:
        _decode(tracing, held, held.landed_at_s, ended_at_s, error)
    elif held.sequence.has_remote_kv:
        span = _span(tracing, held, "landing", held.received_at_s)
        span.end(ended_at_s, error=error)
    elif held.sequence.request.output_token_ids:
        _decode(tracing, held, held.computing_since_s or held.received_at_s, ended_at_s, error)
    else:
        _prefill(tracing, held, ended_at_s, error)


def _prefill(tracing: Tracing, held: Held, ended_at_s: float, error: str) -> None:
    computing_at_s, token_at_s = held.computing_since_s, held.first_token_at_s
    span = _span(tracing, held, "prefill", held.received_at_s)
    queue = span.child("queue", held.received_at_s)
    queue.end(ended_at_s if computing_at_s is None else computing_at_s)
    if computing_at_s is not None:
        compute = span.child("compute", computing_at_s)
        compute.set({"pdserve.chunks": held.num_chunks})
        compute.end(ended_at_s if token_at_s is None else token_at_s)
    span.set(
        {
            "pdserve.prompt_tokens": held.sequence.num_prompt,
            "pdserve.cached_tokens": held.sequence.num_cached_tokens,
        }
    )
    if token_at_s is None:
        span.end(ended_at_s, error=error)
        return
    span.end(token_at_s)
    if held.sequence.is_exported:
        _transfer(tracing, held, token_at_s, ended_at_s, error)
    else:
        _decode(tracing, held, token_at_s, ended_at_s, error)


def _transfer(
    tracing: Tracing, held: Held, token_at_s: float, ended_at_s: float, error: str
) -> None:
    timing = held.transfer
    if timing is None:
        span = _span(tracing, held, "kv transfer", token_at_s)
        span.end(ended_at_s, error=error)
        return
    span = _span(tracing, held, "kv transfer", timing.first_sent_at_s)
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


def _decode(tracing: Tracing, held: Held, began_at_s: float, ended_at_s: float, error: str) -> None:
    sequence = held.sequence
    span = _span(tracing, held, "decode", began_at_s)
    span.set(
        {
            "gen_ai.usage.output_tokens": sequence.num_output,
            "pdserve.drafted_tokens": sequence.num_drafted,
            "pdserve.accepted_tokens": sequence.num_accepted_drafts,
        }
    )
    span.end(ended_at_s, error=error)


def _span(tracing: Tracing, held: Held, name: str, began_at_s: float) -> Span:
    span = tracing.span(name, began_at_s, parent=held.sequence.request.traceparent)
    span.set(_of(held))
    return span


def _of(held: Held) -> Attributes:
    return {
        "pdserve.request_id": held.attempt.request_id,
        "pdserve.attempt": held.attempt.attempt,
        "pdserve.outcome": held.outcome,
    }
