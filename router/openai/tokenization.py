"""`/tokenize` and `/detokenize`, as vLLM has them: from text to token ids and back, on no node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from pydantic import Field
from starlette.types import Receive, Scope, Send

from common.config import ApiConfig
from common.errors import DeadlineExceeded, InvalidRequest
from router.http.errors import api_error
from router.http.exchange import ClientClosed, Reply, read_body, while_client_waits
from router.http.sse import to_json
from router.openai.api import OpenAiApi
from router.openai.checked_fields import check_model
from router.openai.planning import BodyPlanner
from router.openai.request_plan import RequestKind
from router.openai.schemas import Body, parse_body
from router.text.text_model import TextModel

MAX_DETOKENIZE_BYTES = 128 << 10
"""The largest body of `/detokenize`: its tokens become text on the event loop, in some 10 ms."""

Answer = Callable[[bytes], Coroutine[Any, Any, dict[str, Any]]]


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class TokenizationApi:
    """Both endpoints, for one model."""

    def __init__(
        self,
        config: ApiConfig,
        text_model: TextModel,
        planner: BodyPlanner,
        api: OpenAiApi,
    ) -> None:
        self._config = config
        self._model = text_model
        self._planner = planner
        self._api = api

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the tokens of a body's `prompt` or `messages`, as a node would get them."""
        await self._serve(scope, receive, send, self._config.max_body, self._tokens)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the text of a body's `tokens`, special tokens included."""
        await self._serve(scope, receive, send, MAX_DETOKENIZE_BYTES, self._text)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, max_bytes: int, answer: Answer
    ) -> None:
        reply = Reply(send)
        timeout_s = self._config.request_timeout_s
        try:
            with self._api.seat():
                async with asyncio.timeout(timeout_s):
                    body = await read_body(scope, receive, max_bytes)
                    await while_client_waits(receive, self._send(reply, answer(body)))
        except ClientClosed:
            return
        except TimeoutError:
            late = DeadlineExceeded(f"the request was not done within {timeout_s:g} s")
            await reply.send_error(api_error(late))
        except Exception as error:
            wrong = api_error(error)
            if wrong.status == 500:
                raise
            await reply.send_error(wrong)

    async def _send(self, reply: Reply, answer: Coroutine[Any, Any, dict[str, Any]]) -> None:
        await reply.send_json(to_json(await answer))

    async def _tokens(self, body: bytes) -> dict[str, Any]:
        max_model_len = self._api.max_model_len
        plan = await self._planner.plan(RequestKind.EITHER, body, max_model_len)
        self._api.unknown_fields.take(plan.ignored_fields)
        if len(plan.choices) != plan.choices_per_prompt:
            raise InvalidRequest("prompt holds several prompts: wanted one", param="prompt")
        tokens = plan.choices[0].prompt_token_ids
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
