"""The record of one HTTP request that has ended: a line in the log, and its span.

It never contains the prompt, the answer or a key: only counts, times, names and ids.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Scope

from common.observing.clock import Clock
from common.observing.logs import log_fields
from common.observing.tracing import NO_SPAN, Span, SpanKind, Tracing, trace_id_of
from router.text.output.usage import Usage

log = logging.getLogger("pdserve.router.requests")

MAX_SHOWN_NODES = 8
MAX_SHOWN_CHOICES = 4
_CALM_ENDS = frozenset({"ok", "client_closed", "cancelled"})

Operation = Literal["chat", "text_completion"]
"""The operation of a request, in OpenTelemetry's terms (`gen_ai.operation.name`)."""


@dataclass(slots=True)
class RequestWatch:
    """One request in progress. `nodes` held a part of it; `choices` are the ids that nodes use."""

    endpoint: str
    model: str
    arrived_at_s: float
    request_id: str = ""
    api_key_name: str = ""
    api_key_sha256: str = field(default="", repr=False)
    """It says whose KV the request may use, and is not recorded."""
    session_name: bytes = b""
    """What a header calls the session of the request. It is not recorded."""
    span: Span = NO_SPAN
    usage: Usage | None = None
    nodes: dict[str, None] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    num_choices: int = 0
    num_retries: int = 0
    _first_token_at_s: float | None = None

    def on_planned(self, usage: Usage, began_at_s: float, now_s: float) -> None:
        """Record that the body, which was read at `began_at_s`, is tokenised."""
        self.usage = usage
        if self.span.is_recording:
            tokenize = self.span.child("tokenize", began_at_s)
            tokenize.set({"gen_ai.usage.input_tokens": usage.prompt_tokens})
            tokenize.end(now_s)

    def on_choice(self, choice_id: str) -> None:
        """Record the id under which a choice is sent to nodes."""
        self.num_choices += 1
        if len(self.choices) < MAX_SHOWN_CHOICES:
            self.choices.append(choice_id)

    def on_node(self, node_id: str) -> None:
        """Record a node that holds a part of the request."""
        if len(self.nodes) < MAX_SHOWN_NODES:
            self.nodes[node_id] = None

    def on_retry(self) -> None:
        """Count another attempt of a choice."""
        self.num_retries += 1

    def on_first_token(self, now_s: float) -> None:
        """Record the first token of a choice."""
        if self._first_token_at_s is None:
            self._first_token_at_s = now_s

    def end(self, outcome: str, status: int | None, now_s: float, *, why: str = "") -> None:
        """Record the end: `ok`, `client_closed`, `cancelled` or an error's code.

        `status` is the HTTP status that was sent. `why` is the error's text, unless it may quote
        the conversation.
        """
        if log.isEnabledFor(logging.INFO):
            self._log(outcome, status, now_s, why)
        if self.span.is_recording:
            self._end_span(outcome, status, now_s)

    @property
    def _ttft_s(self) -> float | None:
        first_at_s = self._first_token_at_s
        return None if first_at_s is None else first_at_s - self.arrived_at_s

    def _log(self, outcome: str, status: int | None, now_s: float, why: str) -> None:
        usage, ttft_s = self.usage, self._ttft_s
        log.info(
            "request ended: %s",
            outcome,
            extra=log_fields(
                request_id=self.request_id,
                trace_id=trace_id_of(self.span.traceparent),
                api_key=self.api_key_name or None,
                endpoint=self.endpoint,
                model=self.model,
                outcome=outcome,
                status=status,
                error=why or None,
                prompt_tokens=usage and usage.prompt_tokens,
                output_tokens=usage and usage.completion_tokens,
                ttft_ms=None if ttft_s is None else round(ttft_s * 1e3, 1),
                duration_ms=round((now_s - self.arrived_at_s) * 1e3, 1),
                nodes=list(self.nodes) or None,
                choices=self.choices or None,
                num_choices=self.num_choices or None,
                retries=self.num_retries or None,
            ),
        )

    def _end_span(self, outcome: str, status: int | None, now_s: float) -> None:
        span, usage, ttft_s = self.span, self.usage, self._ttft_s
        span.set({"pdserve.outcome": outcome, "pdserve.choices": self.num_choices})
        if status is not None:
            span.set({"http.response.status_code": status})
        if usage is not None:
            span.set(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "pdserve.cached_tokens": usage.cached_tokens,
                }
            )
        if ttft_s is not None:
            span.set({"pdserve.ttft_s": ttft_s})
        # A client's error is not this server's error.
        is_refused = status is not None and 400 <= status < 500
        span.end(now_s, error="" if outcome in _CALM_ENDS or is_refused else outcome)


class RequestWatcher:
    """Begins to watch requests for one model."""

    def __init__(self, model: str, clock: Clock, tracing: Tracing) -> None:
        self._model = model
        self._clock = clock
        self._tracing = tracing

    def begin(self, endpoint: str, operation: Operation | None, scope: Scope) -> RequestWatch:
        """Begin to watch a request, whose id and key name the middleware stored in the scope.

        One without an operation asks nothing of a model, and has no span.
        """
        state = scope.get("state", {})
        watch = RequestWatch(
            endpoint,
            self._model,
            self._clock.now_s(),
            state.get("request_id", ""),
            state.get("api_key_name", ""),
            state.get("api_key_sha256", ""),
        )
        if self._tracing.is_on and operation is not None:
            watch.span = self._span(watch, operation, scope)
        return watch

    def _span(self, watch: RequestWatch, operation: Operation, scope: Scope) -> Span:
        parent = next((v for k, v in scope["headers"] if k == b"traceparent"), b"")
        span = self._tracing.span(
            "request",
            watch.arrived_at_s,
            parent=parent[:64].decode("latin-1"),
            kind=SpanKind.SERVER,
        )
        if span.is_recording:
            span.set(
                {
                    "http.request.method": scope["method"],
                    "http.route": scope["path"],
                    "url.path": scope["path"],
                    "url.scheme": scope["scheme"],
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "pdserve",
                    "gen_ai.request.model": watch.model,
                    "pdserve.request_id": watch.request_id,
                    "pdserve.api_key": watch.api_key_name,
                }
            )
        return span
