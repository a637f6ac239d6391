"""From text to token ids and back, on no node.

`/tokenize` and `/detokenize` are as vLLM has them, `/v1/messages/count_tokens` as Anthropic has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from common.errors import DeadlineExceeded, InvalidRequest
from common.observing.clock import Clock
from common.observing.logs import log_fields
from common.settings.config import ApiConfig
from router.api.bodies.checked_fields import check_model
from router.api.bodies.schemas import DetokenizeBody, parse_body
from router.api.generation import OpenAiApi, reason_to_log
from router.api.planning.body_planner import BodyPlanner
from router.api.planning.request_plan import RequestKind, RequestPlan
from router.http.errors import api_error
from router.http.exchange import ClientClosed, Reply, read_body, while_client_waits
from router.http.sse import to_json
from router.text.text_model import TextModel
from router.watch.request_watch import RequestWatch, RequestWatcher

logger = logging.getLogger("pdserve.router.http")

MAX_DETOKENIZE_BYTES = 128 << 10
"""The largest body of `/detokenize`: its tokens become text on the event loop, in some 10 ms."""

Answer = Callable[[bytes], Coroutine[Any, Any, dict[str, Any]]]
Serve = Callable[[Scope, Receive, Reply], Awaitable[None]]


class TokenizationApi:
    """All of these endpoints, for one model."""

    def __init__(
        self,
        config: ApiConfig,
        text_model: TextModel,
        planner: BodyPlanner,
        api: OpenAiApi,
        watcher: RequestWatcher,
        clock: Clock,
    ) -> None:
        self._config = config
        self._model = text_model
        self._planner = planner
        self._api = api
        self._watcher = watcher
        self._clock = clock

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the tokens of a body's `prompt` or `messages`, as a node would get them."""
        watch = self._watcher.begin("tokenize", None, scope)
        answer = partial(self._answer, self._config.max_body, self._tokens)
        await self._serve(watch, answer, scope, receive, send)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the text of a body's `tokens`, special tokens included."""
        watch = self._watcher.begin("detokenize", None, scope)
        answer = partial(self._answer, MAX_DETOKENIZE_BYTES, self._text)
        await self._serve(watch, answer, scope, receive, send)

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the number of tokens of the prompt of a message, as a node would get it."""
        watch = self._watcher.begin("count_tokens", None, scope)
        answer = partial(self._answer, self._config.max_body, self._num_tokens)
        await self._serve(watch, answer, scope, receive, send)

    async def _serve(
        self, watch: RequestWatch, answer: Serve, scope: Scope, receive: Receive, send: Send
    ) -> None:
        reply, outcome, why = Reply(send), "cancelled", ""
        try:
            self._api.require_seat(scope)
            await answer(scope, receive, reply)
            outcome = "ok"
        except ClientClosed:
            outcome = "client_closed"
        except Exception as error:
            wrong = api_error(error)
            outcome, why = wrong.code, reason_to_log(error)
            if wrong.status == 500:
                logger.exception(
                    "request failed: %s", error, extra=log_fields(request_id=watch.request_id)
                )
            await reply.send_error(wrong, scope["path"])
        finally:
            watch.end(outcome, reply.status, self._clock.now_s(), why=why)

    async def _answer(
        self, max_bytes: int, answer: Answer, scope: Scope, receive: Receive, reply: Reply
    ) -> None:
        timeout_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                body = await read_body(scope, receive, max_bytes)
                with self._api.seat(scope):
                    await while_client_waits(receive, self._send(reply, answer(body)))
        except TimeoutError:
            raise DeadlineExceeded(f"the request was not done within {timeout_s:g} s") from None

    async def _send(self, reply: Reply, answer: Coroutine[Any, Any, dict[str, Any]]) -> None:
        await reply.send_json(to_json(await answer))

    async def _plan(self, kind: RequestKind, body: bytes) -> RequestPlan:
        plan = await self._planner.plan(kind, body, self._api.max_model_len)
        self._api.unknown_fields.take(plan.ignored_fields, plan.left_out)
        return plan

    async def _num_tokens(self, body: bytes) -> dict[str, Any]:
        plan = await self._plan(RequestKind.COUNTED_MESSAGE, body)
        return {"input_tokens": len(plan.choices[0].prompt_token_ids)}

    async def _tokens(self, body: bytes) -> dict[str, Any]:
        plan = await self._plan(RequestKind.EITHER, body)
        if len(plan.choices) != plan.choices_per_prompt:
            raise InvalidRequest("prompt holds several prompts: wanted one", param="prompt")
        tokens = plan.choices[0].prompt_token_ids
        max_model_len = self._api.max_model_len
        return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}

    async def _text(self, raw: bytes) -> dict[str, Any]:
        body = parse_body(DetokenizeBody, raw)
        check_model(body.model, self._model)
        most = self._model.vocab_size - 1
        for token_id in body.tokens:
            if not 0 <= token_id <= most:
                raise InvalidRequest(
                    f"tokens holds {token_id}: this model has ids 0 to {most}", param="tokens"
                )
        return {"prompt": self._model.decode(body.tokens, with_special_tokens=True)}
