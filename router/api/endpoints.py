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
from router.api.planning.request_plan import RequestKind, RequestPlan
from router.text.logprobs_json import DescribeToken
from router.text.usage import Usage
from router.watch.request_watch import Operation

MakeFormat = Callable[[AnswerHead, RequestPlan, Usage, DescribeToken], AnswerForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What tells the APIs apart. `name` is that of metrics and logs, `operation` that of traces."""

    path: str
    name: str
    operation: Operation
    id_prefix: str
    kind: RequestKind
    make_format: MakeFormat


def _chat(head: AnswerHead, plan: RequestPlan, usage: Usage, describe: DescribeToken) -> AnswerForm:
    kind = ChatFormat if plan.syntax.is_plain else ChatPartsFormat
    return _choices(kind, head, plan, usage, describe)


def _completion(
    head: AnswerHead, plan: RequestPlan, usage: Usage, describe: DescribeToken
) -> AnswerForm:
    return _choices(CompletionFormat, head, plan, usage, describe)


def _choices(
    kind: type[AnswerFormat],
    head: AnswerHead,
    plan: RequestPlan,
    usage: Usage,
    describe: DescribeToken,
) -> AnswerFormat:
    prompts = [choice.prompt_token_ids for choice in plan.returned_choices]
    return kind(
        head,
        describe,
        usage=usage,
        has_logprobs=plan.has_logprobs,
        usage_events=plan.usage_events,
        prompts=prompts if plan.returns_token_ids else (),
        scored=ScoredPrompts(plan.prompt_logprobs, prompts),
        syntax=plan.syntax,
    )


CHAT = Endpoint(
    path="/v1/chat/completions",
    name="chat.completions",
    operation="chat",
    id_prefix="chatcmpl",
    kind=RequestKind.CHAT,
    make_format=_chat,
)
COMPLETIONS = Endpoint(
    path="/v1/completions",
    name="completions",
    operation="text_completion",
    id_prefix="cmpl",
    kind=RequestKind.COMPLETION,
    make_format=_completion,
)
RESPONSES = Endpoint(
    path="/v1/responses",
    name="responses",
    operation="chat",
    id_prefix="resp",
    kind=RequestKind.RESPONSE,
    make_format=lambda head, plan, usage, _: ResponseFormat(head, plan, usage),
)
MESSAGES = Endpoint(
    path="/v1/messages",
    name="messages",
    operation="chat",
    id_prefix="msg",
    kind=RequestKind.MESSAGE,
    make_format=lambda head, plan, usage, _: MessageFormat(head, plan, usage),
)
