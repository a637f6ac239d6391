"""The endpoints that generate: from a body to tokens to an answer.

One request, in order: one deadline for everything that follows, the body, a seat (or 429), the
plan, the choices, then either a stream or one JSON answer. The status of a stream is sent when
nodes have accepted its choices, so whatever fails before is a status; later failures are an event.
A client that leaves, an error and the deadline all abort every choice before the seat is given
back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from starlette.types import Receive, Scope, Send

from common.errors import DeadlineExceeded, Overloaded
from common.observing.clock import Clock
from common.observing.logs import log_fields
from common.settings.config import ApiConfig
from common.version import VERSION
from http_serving.abort_connection import abort_connection
from http_serving.part_writing import part_writer
from router.access.spaced_lines import client_address
from router.api.answers.answer import Answer, StreamedAnswer, WholeAnswer
from router.api.answers.chat_and_completions import AnswerHead
from router.api.answers.turns import Turns
from router.api.bodies.unknown_fields import UnknownFields
from router.api.endpoints import Endpoint
from router.api.planning.body_planner import BodyPlanner
from router.api.planning.request_plan import ChoicePlan, RequestPlan
from router.core.cluster_view import ClusterView
from router.core.generation import SHUTTING_DOWN, Generator
from router.http.errors import ApiError, TooManyRequests, api_error
from router.http.exchange import ClientClosed, Reply, read_body, while_client_waits
from router.text.chat_template import TemplateRefused
from router.text.choice_text import ChoiceText
from router.text.prompt_tokens import EchoedEntries
from router.text.text_model import TextModel
from router.text.usage import Usage
from router.tools.call_search import call_search
from router.watch.edge_counters import RequestError
from router.watch.http_metrics import ChoiceTimer, HttpMetrics
from router.watch.request_watch import RequestWatch, RequestWatcher

logger = logging.getLogger("pdserve.router.http")

SYSTEM_FINGERPRINT = f"pdserve-{VERSION}"
"""The part of a client's `seed` that is not the request's: another version may answer otherwise."""

TOKENS_PER_TURN = 32_768
"""Of all prompts and lists of allowed tokens that a request starts in one turn of the event loop,
which takes 2 ms; a million tokens, 128 prompts of 8192, would take 50 ms. Calls of one turn share
messages to the nodes."""

ADMIN_SEATS = 8
"""Places beside those of everybody, for an administrator who looks for what takes all of those."""

FINAL_EVENT_TIMEOUT_S = 1.0
"""How long the last event of a broken stream may wait for a client that does not read."""


class OpenAiApi:
    """All endpoints that generate, over one model and one generator."""

    def __init__(
        self,
        *,
        config: ApiConfig,
        text_model: TextModel,
        planner: BodyPlanner,
        generator: Generator,
        cluster: ClusterView,
        metrics: HttpMetrics,
        clock: Clock,
        watcher: RequestWatcher,
    ) -> None:
        self._config = config
        self._model = text_model
        self._planner = planner
        self._generator = generator
        self._cluster = cluster
        self._metrics = metrics
        self._clock = clock
        self._watcher = watcher
        self.unknown_fields = UnknownFields(are_refused=config.strict_fields)
        self._num_in_progress = 0
        self._turns = Turns()

    @property
    def max_model_len(self) -> int:
        """The longest prompt and output that this model, and a node that is alive, can hold."""
        return min(self._model.max_model_len, self._cluster.max_model_len() or sys.maxsize)

    async def handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, errors included. Raises only when the server itself is stopping."""
        reply = Reply(send, part_writer(scope))
        outcome, why, failure = "cancelled", "", None
        watch = self._watcher.begin(endpoint.name, endpoint.operation, scope)
        try:
            self.require_seat(scope)
            await self._serve(endpoint, scope, receive, reply, watch)
            outcome = "ok"
        except ClientClosed:
            outcome = "client_closed"
        except asyncio.CancelledError:
            # The server waits no longer; whoever still does is told so, and may ask elsewhere.
            await _report(scope, reply, api_error(Overloaded(SHUTTING_DOWN)), watch)
            raise
        except Exception as error:
            wrong = api_error(error)
            outcome = wrong.code
            why = reason_to_log(error)
            failure = RequestError(
                at_s=self._clock.now_s(),
                endpoint=endpoint.name,
                request_id=watch.request_id,
                status=wrong.status,
                code=wrong.code,
                text=why,
            )
            if wrong.status == 500:
                logger.exception(
                    "request failed: %s", error, extra=log_fields(request_id=watch.request_id)
                )
            await _report(scope, reply, wrong, watch)
            del wrong  # where it is `error` itself, its traceback holds this frame: a cycle
        finally:
            self._metrics.ends.count(endpoint.name, outcome, failure)
            watch.end(outcome, reply.status, self._clock.now_s(), why=why)

    def require_seat(self, scope: Scope) -> None:
        """Raise `TooManyRequests` where no place is free: called before a body is read, too.

        A few are kept for administrators, by the keys of which they are told apart.
        """
        state = scope.get("state", {})
        num_kept = ADMIN_SEATS if state.get("is_admin") and state.get("api_key_name") else 0
        limit = self._config.max_concurrent_requests
        if self._num_in_progress >= limit + num_kept:
            raise TooManyRequests(limit)

    @contextmanager
    def seat(self, scope: Scope) -> Iterator[None]:
        """Hold one of the places for requests in progress, whose bodies are here.

        Raises `TooManyRequests` without any.
        """
        self.require_seat(scope)
        self._num_in_progress += 1
        self._metrics.in_progress.inc()
        try:
            yield
        finally:
            self._num_in_progress -= 1
            self._metrics.in_progress.dec()

    async def _serve(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, reply: Reply, watch: RequestWatch
    ) -> None:
        timeout_s = self._config.request_timeout_s
        client = watch.api_key_name or client_address(scope)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                body = await read_body(scope, receive, self._config.max_body)
                with self.seat(scope):
                    work = self._answer(endpoint, body, client, watch, reply)
                    await while_client_waits(receive, work)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the request was not done within {timeout_s:g} s, the most this server allows"
            ) from None

    async def _answer(
        self, endpoint: Endpoint, body: bytes, client: str, watch: RequestWatch, reply: Reply
    ) -> None:
        began_at_s = self._clock.now_s()
        plan = await self._planner.plan(endpoint.kind, body, self.max_model_len, client)
        self.unknown_fields.take(plan.ignored_fields, plan.left_out)
        head = AnswerHead(
            id=f"{endpoint.id_prefix}-{secrets.token_hex(12)}",
            created_s=int(time.time()),
            model=self._model.name,
            system_fingerprint=SYSTEM_FINGERPRINT,
        )
        usage = Usage(plan.prompt_lengths, plan.choices_per_prompt)
        form = endpoint.make_format(head, plan, usage, self._model.describe_token)
        reply.error_event = form.error_event
        watch.on_planned(usage, began_at_s, self._clock.now_s())
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        if plan.is_stream:
            answer: Answer = StreamedAnswer(
                form,
                usage,
                reply,
                len(plan.choices),
                self._turns,
                has_logprobs=plan.has_logprobs,
            )
        else:
            answer = WholeAnswer(
                form,
                usage,
                reply,
                len(plan.choices),
                self._turns,
                best_of=plan.choices_per_prompt,
                num_best=plan.returned_per_prompt,
            )
        try:
            await self._start_all(answer, plan, watch)
            await answer.send()
        finally:
            answer.abort()
        self._metrics.count_usage(usage)

    async def _start_all(self, answer: Answer, plan: RequestPlan, watch: RequestWatch) -> None:
        num_tokens = 0
        for choice in plan.choices:
            self._start(answer, plan, choice, watch)
            num_tokens += len(choice.prompt_token_ids) + len(plan.rules.allowed_token_ids)
            if num_tokens >= TOKENS_PER_TURN:
                num_tokens = 0
                await asyncio.sleep(0)

    def _start(
        self, answer: Answer, plan: RequestPlan, choice: ChoicePlan, watch: RequestWatch
    ) -> None:
        text = ChoiceText(
            self._model.new_detokenizer(
                choice.prompt_token_ids if plan.continues_prompt else (),
                with_special_tokens=plan.shows_special_tokens,
                # An answer that follows a constraint alone has the text that it describes.
                keeps_first_space=plan.grammar is not None and plan.syntax.is_plain,
            ),
            plan.stop,
            min_tokens=choice.sampling.min_tokens,
            has_logprobs=choice.sampling.logprobs is not None,
            hidden_token_ids=plan.hidden_token_ids,
            stop_token_ids=plan.stop_token_ids,
            shows_stop=plan.shows_stop,
            echo=choice.echo,
            echoed=None
            if plan.echo_logprobs is None
            else partial(
                EchoedEntries, choice.prompt_token_ids, choice.echo_offsets, plan.echo_logprobs
            ),
            has_output=plan.has_output,
            calls=call_search(plan.syntax) if plan.stop else None,
        )
        left_s = watch.arrived_at_s + self._config.request_timeout_s - self._clock.now_s()
        generate = partial(
            self._generator.generate,
            choice.prompt_token_ids,
            choice.sampling,
            deadline_s=max(left_s, 0.0),
            priority=choice.priority,
            cache_salt=plan.cache_salt,
            listener=watch,
        )
        answer.start(text, ChoiceTimer(self._metrics, self._clock, watch).on_deltas, generate)


def reason_to_log(error: Exception) -> str:
    """Return the text of an error that a client is told, unless it may quote a conversation."""
    return "" if isinstance(error, TemplateRefused) else api_error(error).message


async def _report(scope: Scope, reply: Reply, error: ApiError, watch: RequestWatch) -> None:
    """Tell the client: with a status, or in the last event when the status is out.

    One that does not read is let go, with what it has not read.
    """
    if not reply.is_started:
        await reply.send_error(error, scope["path"])
        return
    try:
        async with asyncio.timeout(FINAL_EVENT_TIMEOUT_S):
            await reply.end_stream(reply.error_event(error))
    except TimeoutError:
        logger.info(
            "a client that does not read was not told: %s",
            error.code,
            extra=log_fields(request_id=watch.request_id),
        )
        abort_connection(scope)
