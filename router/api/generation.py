"""The endpoints that generate: from a body to tokens to an answer.

One request, in order: the plan, the choices, then either a stream or one JSON answer. The status of
a stream is sent when nodes have accepted its choices, so whatever fails before is a status; later
failures are an event. However the exchange ends, every choice is aborted.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from fastapi import FastAPI, Response
from starlette.types import ASGIApp

from common.errors import InvalidRequest
from common.observing.clock import Clock
from common.request import SamplingParams
from common.settings.config import ApiConfig
from common.version import VERSION
from router.api.answers.answer import Answer, AnswerTurns, StreamedAnswer, WholeAnswer
from router.api.answers.chat_and_completions import AnswerHead
from router.api.bodies.asked import RequestKind
from router.api.bodies.unknown_fields import UnknownFields
from router.api.endpoints import ENDPOINTS, Endpoint
from router.api.exchanges import Exchanges
from router.api.planning.body_planner import BodyPlanner
from router.api.planning.planner import PlannedPrompt, RequestPlan
from router.api.prefix_sharing import PrefixSharing
from router.api.sessions import session_id
from router.core.cluster_view import ClusterView
from router.core.generation import Generator
from router.http.api_texts import ANSWERS
from router.http.described import described_body
from router.http.exchange import Exchange, Reply
from router.http.routes import Access, open_to
from router.text.output.choice_text import ChoiceText
from router.text.output.prompt_tokens import EchoedEntries
from router.text.output.stop_strings import NO_TOKENS
from router.text.output.usage import Usage
from router.text.text_model import TextModel
from router.tools.stop_scope import stop_scope
from router.watch.http_metrics import ChoiceTimer, HttpMetrics
from router.watch.request_watch import RequestWatch

SYSTEM_FINGERPRINT = f"pdserve-{VERSION}"
"""The part of a client's `seed` that is not the request's: another version may answer otherwise."""

TOKENS_PER_TURN = 32_768
"""Tokens of prompts and of lists of allowed tokens that a request starts in one turn of the event
loop, which takes 2 ms; a million tokens, 128 prompts of 8192, would take 50 ms. Calls of one turn
share messages to the nodes."""


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
    ) -> None:
        self._config = config
        self._model = text_model
        self._planner = planner
        self._generator = generator
        self._cluster = cluster
        self._metrics = metrics
        self._clock = clock
        self._prefix_sharing = PrefixSharing(config.prefix_sharing)
        self._unknown_fields = UnknownFields(are_refused=config.strict_fields)
        self._turns = AnswerTurns()

    @property
    def max_model_len(self) -> int:
        """The longest prompt and output that this model, and a node that is alive, can hold."""
        return min(self._model.max_model_len, self._cluster.max_model_len() or sys.maxsize)

    async def plan(self, kind: RequestKind, body: bytes, client: str = "") -> RequestPlan:
        """Return the plan of `body`; see `BodyPlanner.plan`.

        Raises what that raises, and `InvalidRequest` for unknown fields where they are refused.
        """
        plan = await self._planner.plan(kind, body, self.max_model_len, client)
        self._unknown_fields.take(plan.shape.ignored_fields, plan.shape.left_out)
        return plan

    async def answer(
        self, endpoint: Endpoint, body: bytes, client: str, watch: RequestWatch, reply: Reply
    ) -> None:
        """Send the answer of `endpoint` to a body. Raises the error that ended it."""
        planned_for = self.max_model_len
        try:
            await self._answer(endpoint, body, client, watch, reply)
        except InvalidRequest:
            # While a request waits for a node, one may come that holds less than is planned for:
            # less than the model allows, where there was none.
            if reply.is_started or self.max_model_len >= planned_for:
                raise
            await self._answer(endpoint, body, client, watch, reply)

    async def _answer(
        self, endpoint: Endpoint, body: bytes, client: str, watch: RequestWatch, reply: Reply
    ) -> None:
        began_at_s = self._clock.now_s()
        plan = await self.plan(endpoint.kind, body, client)
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
        if plan.shape.is_stream:
            answer: Answer = StreamedAnswer(
                form,
                usage,
                reply,
                plan.num_choices,
                self._turns,
                has_logprobs=plan.shape.has_logprobs,
            )
        else:
            answer = WholeAnswer(
                form,
                usage,
                reply,
                plan.num_choices,
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
        generate = partial(
            self._generator.generate,
            priority=plan.priority,
            cache_salt=self._prefix_sharing.salt(watch.api_key_sha256, plan.cache_salt),
            needs_salt=self._prefix_sharing.needs_salt(plan.cache_salt),
            session=session_id(watch.api_key_name, watch.session_name, plan.session),
            listener=watch,
        )
        num_tokens = 0
        num_allowed = len(plan.sampling.rules.allowed_token_ids)
        named_tokens = self._named_tokens(plan)
        for prompt, sampling in plan.choices():
            self._start(answer, plan, prompt, sampling, named_tokens, generate, watch)
            num_tokens += len(prompt.token_ids) + num_allowed
            if num_tokens >= TOKENS_PER_TURN:
                num_tokens = 0
                await asyncio.sleep(0)

    def _named_tokens(self, plan: RequestPlan) -> Mapping[str, int]:
        """Return the special tokens that stop strings name and that have no text in the answer."""
        if plan.shows_special_tokens:
            return NO_TOKENS
        has_tags = not plan.syntax.is_plain
        return self._model.special_tokens_in(plan.shape.stop, with_special_tags=has_tags)

    def _start(
        self,
        answer: Answer,
        plan: RequestPlan,
        prompt: PlannedPrompt,
        sampling: SamplingParams,
        named_tokens: Mapping[str, int],
        generate: Callable[..., Callable[[], None]],
        watch: RequestWatch,
    ) -> None:
        stop = plan.shape.stop
        text = ChoiceText(
            self._model.new_detokenizer(
                prompt.token_ids if plan.continues_prompt else (),
                with_special_tokens=plan.shows_special_tokens,
                with_special_tags=not plan.syntax.is_plain,
                # An answer that follows a constraint alone has the text that it describes.
                keeps_first_space=sampling.grammar is not None and plan.syntax.is_plain,
            ),
            stop,
            min_tokens=sampling.min_tokens,
            has_logprobs=sampling.logprobs is not None,
            hidden_token_ids=plan.hidden_token_ids,
            stop_token_ids=plan.stop_token_ids,
            named_tokens=named_tokens,
            shows_stop=plan.shape.shows_stop,
            echo=prompt.echo,
            echoed=None
            if plan.echo_logprobs is None
            else partial(EchoedEntries, prompt.token_ids, prompt.echo_offsets, plan.echo_logprobs),
            has_output=plan.has_output,
            scope=stop_scope(plan.syntax) if stop else None,
            thinking=plan.syntax.thinking_tokens(),
        )
        left_s = watch.arrived_at_s + self._config.request_timeout_s - self._clock.now_s()
        choice = answer.new_choice(text, ChoiceTimer(self._metrics, self._clock, watch).on_deltas)
        abort = generate(
            prompt.token_ids,
            sampling,
            choice,
            deadline_s=max(left_s, 0.0),
            is_cut_to_fit=prompt.is_cut_to_fit,
        )
        choice.abort_by(abort)


def add_generation_routes(app: FastAPI, api: OpenAiApi, exchanges: Exchanges) -> dict[str, ASGIApp]:
    """Add the routes to `app`, and return what serves them without the framework, by path."""
    return {one.path: _add_generation(app, one, api, exchanges) for one in ENDPOINTS}


def _add_generation(
    app: FastAPI, endpoint: Endpoint, api: OpenAiApi, exchanges: Exchanges
) -> ASGIApp:
    answer = partial(api.answer, endpoint)
    serve = partial(exchanges.serve_exchange, endpoint.name, endpoint.operation, answer)

    @app.post(
        endpoint.path,
        name=endpoint.name,
        summary=endpoint.title,
        tags=[ANSWERS],
        description=endpoint.body.__doc__,
        responses=endpoint.responses,
        openapi_extra=described_body(endpoint.body),
    )
    @open_to(Access.LIMITED)
    async def generate() -> Response:
        return Exchange(serve)

    return serve
