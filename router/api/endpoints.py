"""The endpoints that generate, over one core: what a body means, and the shape of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.api.answers.chat_and_completions import (
    AnswerForm,
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    ScoredPrompts,
)
from router.api.answers.chat_parts import ChatPartsFormat
from router.api.answers.messages import MessageFormat
from router.api.answers.responses import ResponseFormat
from router.api.answers.shapes import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    MessageAnswer,
    MessageError,
    NamedEvent,
    ResponseAnswer,
    stream_responses,
)
from router.api.bodies.asked import RequestKind
from router.api.bodies.messages.request import MessageBody
from router.api.bodies.responses.request import ResponseBody
from router.api.bodies.schemas import ChatBody, CompletionBody, WholeBody
from router.api.planning.planner import RequestPlan
from router.http.described import Responses
from router.text.output.logprobs_json import DescribeToken
from router.text.output.usage import Usage
from router.watch.request_watch import Operation

MakeFormat = Callable[[AnswerHead, RequestPlan, Usage, DescribeToken], AnswerForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One API: `name` stands in metrics and logs, `operation` in traces.

    `title`, `body` and `responses` describe it, for `/openapi.json`.
    """

    path: str
    name: str
    title: str
    operation: Operation
    id_prefix: str
    kind: RequestKind
    make_format: MakeFormat
    body: type[WholeBody]
    responses: Responses


def _choices(kind_of: Callable[[RequestPlan], type[AnswerFormat]]) -> MakeFormat:
    """Return what makes the format of an answer with choices."""

    def make(
        head: AnswerHead, plan: RequestPlan, usage: Usage, describe: DescribeToken
    ) -> AnswerFormat:
        prompts, shape = plan.prompts_of_returned, plan.shape
        return kind_of(plan)(
            head,
            describe,
            usage=usage,
            has_logprobs=shape.has_logprobs,
            usage_events=shape.usage_events,
            prompts=prompts if shape.returns_token_ids else (),
            scored=ScoredPrompts(shape.prompt_logprobs, prompts),
            syntax=plan.syntax,
            hides_thinking=shape.hides_thinking,
        )

    return make


CHAT = Endpoint(
    path="/v1/chat/completions",
    name="chat.completions",
    title="Answer a conversation",
    operation="chat",
    id_prefix="chatcmpl",
    kind=RequestKind.CHAT,
    make_format=_choices(lambda plan: ChatFormat if plan.syntax.is_plain else ChatPartsFormat),
    body=ChatBody,
    responses=stream_responses(ChatAnswer, ChatEvent),
)
COMPLETIONS = Endpoint(
    path="/v1/completions",
    name="completions",
    title="Continue a text",
    operation="text_completion",
    id_prefix="cmpl",
    kind=RequestKind.COMPLETION,
    make_format=_choices(lambda _: CompletionFormat),
    body=CompletionBody,
    responses=stream_responses(CompletionAnswer, CompletionEvent),
)
RESPONSES = Endpoint(
    path="/v1/responses",
    name="responses",
    title="Answer as OpenAI's responses do",
    operation="chat",
    id_prefix="resp",
    kind=RequestKind.RESPONSE,
    make_format=lambda head, plan, usage, _: ResponseFormat(head, plan, usage),
    body=ResponseBody,
    responses=stream_responses(ResponseAnswer, NamedEvent, has_done=False),
)
MESSAGES = Endpoint(
    path="/v1/messages",
    name="messages",
    title="Answer as Anthropic's messages do",
    operation="chat",
    id_prefix="msg",
    kind=RequestKind.MESSAGE,
    make_format=lambda head, plan, usage, _: MessageFormat(head, plan, usage),
    body=MessageBody,
    responses=stream_responses(MessageAnswer, NamedEvent, MessageError, has_done=False),
)

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
