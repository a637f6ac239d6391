"""The answers and events of all endpoints of the APIs, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from common.wire_types import Count, Size
from router.http.described import (
    ERRORS,
    ErrorAnswer,
    Responses,
    error_responses,
    named_schema,
    response,
)
from router.text.output.usage import UsageAnswer

_Logprob = Annotated[float, Field(le=0)]
_TokenIds = Annotated[list[Count], Field(description="With return_token_ids.")]


class LikelyToken(TypedDict):
    token: str
    logprob: _Logprob
    bytes: list[Count]


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: Annotated[
        list[_Logprob | None],
        Field(description="null for the first token of a prompt that is echoed."),
    ]
    top_logprobs: list[dict[str, _Logprob] | None]
    text_offset: list[Count]


class RankedToken(TypedDict):
    logprob: _Logprob
    rank: Size
    decoded_token: str


_PromptLogprobs = Annotated[
    list[dict[str, RankedToken] | None],
    Field(description="With prompt_logprobs: by token id; null for the first token."),
]
_Finish = Literal["stop", "length", "tool_calls"]
_Stop = Annotated[
    str | Count | None,
    Field(description="The stop string or stop token that ended the choice."),
]
_Arguments = Annotated[str, Field(description="The text of a JSON object.")]


class CalledByName(TypedDict):
    name: str
    arguments: _Arguments


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: _Arguments


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledByName


class CallDelta(TypedDict):
    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


_Said = Annotated[str | None, Field(description="null where the answer is calls alone.")]
_Thought = Annotated[str, Field(description="What a reasoning model thinks before it.")]


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: _Said
    refusal: None
    reasoning_content: NotRequired[_Thought]
    tool_calls: NotRequired[list[Call]]


class MessageDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: _Said
    reasoning_content: _Thought
    tool_calls: list[CallDelta]


class _Choice(TypedDict):
    index: Count
    finish_reason: _Finish
    stop_reason: _Stop
    token_ids: NotRequired[_TokenIds]


class _ChoiceDelta(TypedDict):
    """More of a choice; its end is in the last event alone."""

    index: Count
    finish_reason: _Finish | None
    stop_reason: NotRequired[_Stop]
    token_ids: NotRequired[_TokenIds]


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatChoiceDelta(_ChoiceDelta):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[_TokenIds]
    prompt_logprobs: NotRequired[_PromptLogprobs]


class CompletionChoiceDelta(_ChoiceDelta):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[_TokenIds]


class _Head(TypedDict):
    id: str
    created: Annotated[Count, Field(description="Unix time in seconds.")]
    model: str
    system_fingerprint: str


class ChatAnswer(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[_TokenIds]
    prompt_logprobs: NotRequired[_PromptLogprobs]
    usage: UsageAnswer


class ChatEvent(_Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoiceDelta]
    prompt_token_ids: NotRequired[_TokenIds]
    usage: NotRequired[UsageAnswer | None]


class CompletionAnswer(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionEvent(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoiceDelta]
    usage: NotRequired[UsageAnswer | None]


class Typed(TypedDict):
    type: str


class TokenCounts(TypedDict):
    input_tokens: Count
    output_tokens: Count


class ResponseAnswer(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: Annotated[
        list[Typed],
        Field(description="reasoning, message, function_call and custom_tool_call items."),
    ]
    usage: TokenCounts | None


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Typed], Field(description="thinking, text and tool_use blocks.")]
    stop_reason: Literal[
        "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
    ]
    stop_sequence: str | None
    usage: TokenCounts


class NamedEvent(TypedDict):
    """Its type is the name of the event; no [DONE] follows the last one."""

    type: str


class MessageErrorFields(TypedDict):
    type: str
    message: str


class MessageError(TypedDict):
    """An error as Anthropic has it."""

    type: Literal["error"]
    error: MessageErrorFields


class TokensAnswer(TypedDict):
    count: Count
    max_model_len: Count
    tokens: list[Count]


class PromptAnswer(TypedDict):
    prompt: str


class CountAnswer(TypedDict):
    input_tokens: Count


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


def stream_responses(
    whole: Any, event: Any, error: Any = ErrorAnswer, *, has_done: bool = True
) -> Responses:
    """Return what a generation endpoint answers: its whole answer or events, and errors.

    `has_done`: whether a stream ends with `[DONE]`.
    """
    last = "; then [DONE]" if has_done else ""
    stream = {
        "schema": named_schema(event),
        "description": f"Server-sent events, each a JSON object behind `data: `{last}. "
        "Lines that begin with a colon say that the first or the next one is awaited.",
    }
    good = response(whole, "The answer, or with `stream` its events")
    good["content"]["text/event-stream"] = stream
    return {200: good, **error_responses(*ERRORS, answer=error)}
