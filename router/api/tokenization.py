"""From text to token ids and back, on no node.

`/tokenize` and `/detokenize` are as vLLM has them, `/v1/messages/count_tokens` as Anthropic has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Response

from common.errors import InvalidRequest
from router.api.answers.shapes import CountAnswer, MessageError, PromptAnswer, TokensAnswer
from router.api.bodies.asked import RequestKind
from router.api.bodies.json_text import checked_text
from router.api.bodies.messages.request import CountedBody
from router.api.bodies.schemas import ChatBody, CompletionBody, DetokenizeBody, parse_body
from router.api.exchanges import Exchanges
from router.api.generation import OpenAiApi
from router.api.planning.planner import check_model
from router.http.api_texts import MODELS
from router.http.described import COMMON_ERRORS, described_body, error_responses, good_response
from router.http.exchange import Exchange, Reply
from router.http.routes import Access, open_to
from router.http.sse import to_json
from router.text.text_model import TextModel
from router.watch.request_watch import RequestWatch

MAX_DETOKENIZE_BYTES = 128 << 10
"""The largest body of `/detokenize`: its tokens become text on the event loop, in some 10 ms."""

Ask = Callable[[bytes], Awaitable[object]]

_ERRORS = COMMON_ERRORS | error_responses(400, 404, 408, 413, 429, 503, 504)


class TokenizationApi:
    """The answers of these endpoints, for one model."""

    def __init__(self, text_model: TextModel, api: OpenAiApi) -> None:
        self._model = text_model
        self._api = api

    async def num_tokens(self, body: bytes) -> CountAnswer:
        """Return the number of tokens of the prompt of a message, as a node would get it."""
        plan = await self._api.plan(RequestKind.COUNTED_MESSAGE, body)
        return {"input_tokens": len(plan.prompts[0].token_ids)}

    async def tokens(self, body: bytes) -> TokensAnswer:
        """Return the tokens of a body's `prompt` or `messages`, as a node would get them.

        Raises `InvalidRequest` for several prompts.
        """
        plan = await self._api.plan(RequestKind.EITHER, body)
        if len(plan.prompts) > 1:
            raise InvalidRequest("prompt holds several prompts: wanted one", param="prompt")
        tokens = plan.prompts[0].token_ids
        max_model_len = self._api.max_model_len
        return {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens)}

    async def text(self, raw: bytes) -> PromptAnswer:
        """Return the text of a body's `tokens`, special tokens included."""
        body = parse_body(DetokenizeBody, checked_text(raw))
        check_model(body.model, self._model)
        self._model.check_ids(body.tokens, "tokens")
        return {"prompt": self._model.decode(body.tokens, with_special_tokens=True)}


async def _answer(ask: Ask, body: bytes, client: str, watch: RequestWatch, reply: Reply) -> None:
    await reply.send_json(to_json(await ask(body)))


def add_tokenization_routes(
    app: FastAPI, tokenization: TokenizationApi, exchanges: Exchanges
) -> None:
    """Add the routes to `app`."""

    def served(name: str, ask: Ask, max_body: int | None = None) -> Exchange:
        answer = partial(_answer, ask)
        return Exchange(partial(exchanges.serve_exchange, name, None, answer, max_body=max_body))

    @app.post(
        "/tokenize",
        summary="From text to tokens",
        tags=[MODELS],
        description="The token ids of a prompt or of a conversation.",
        responses=good_response(TokensAnswer) | _ERRORS,
        openapi_extra=described_body(
            ChatBody | CompletionBody,
            description="A body of one of these endpoints: a chat where it has messages.",
        ),
    )
    @open_to(Access.LIMITED)
    async def tokenize() -> Response:
        return served("tokenize", tokenization.tokens)

    @app.post(
        "/detokenize",
        summary="From tokens to text",
        tags=[MODELS],
        description="The text of token ids.",
        responses=good_response(PromptAnswer) | _ERRORS,
        openapi_extra=described_body(DetokenizeBody),
    )
    @open_to(Access.LIMITED)
    async def detokenize() -> Response:
        return served("detokenize", tokenization.text, MAX_DETOKENIZE_BYTES)

    @app.post(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a message's prompt",
        tags=[MODELS],
        description=CountedBody.__doc__,
        responses=good_response(CountAnswer) | error_responses(*_ERRORS, answer=MessageError),
        openapi_extra=described_body(CountedBody),
    )
    @open_to(Access.LIMITED)
    async def count_tokens() -> Response:
        return served("count_tokens", tokenization.num_tokens)
