"""The parameters of a body of any API, grouped once, when it is parsed.

The groups are what to answer, what to sample, what to output, and how the answer is shown. What a
body alone can have wrong is found here, and the error names the field; `planning` finds what is
wrong for a model or for the prompts. Bodies of other APIs than OpenAI's older two become chats
first. An error about such a chat is in the words of the API asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple

from common.errors import InvalidRequest
from common.grammar import Grammar
from common.request import MAX_LOGPROBS, SamplingParams, check_cache_salt, check_priority
from grammars.gbnf import Gbnf
from router.api.bodies.chat_messages import template_messages, template_options
from router.api.bodies.client_tools import ClientTool
from router.api.bodies.json_text import JsonText, checked_text
from router.api.bodies.messages import request as messages
from router.api.bodies.places import Places
from router.api.bodies.response_format import grammar_of
from router.api.bodies.responses import request as responses
from router.api.bodies.schemas import (
    LIMITS,
    AnyBody,
    ChatBody,
    CompletionBody,
    SamplingFields,
    WholeBody,
    checked_session,
    parse_body,
    parse_fields,
)
from router.api.bodies.thinking import hides_thinking, thinking_budget
from router.api.bodies.tool_fields import tool_use
from router.api.bodies.unknown_fields import LeftOut, named_fields
from router.text.chat.chat_template import ChatOptions
from router.text.output.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS
from router.text.output.usage import UsageEvents
from router.tools.definitions import ToolUse

COMPLETION_MAX_TOKENS = 16
_OPEN = -1
"""What a limit or a seed is at other servers where there is none."""

SESSION_FIELDS = ("prompt_cache_key", "user")
"""The fields that name a session; the first of those that a body has does."""

_READ_APART = {"seed", "max_tokens", "prompt_logprobs", "stop_token_ids", "ignore_eos"}
_DRAWN = [
    one.name
    for one in fields(SamplingParams)
    if one.name in SamplingFields.model_fields.keys() - _READ_APART
]
"""Parameters that a body and a node have under one name and in one form."""


class RequestKind(Enum):
    """Which of the APIs a body is for; either of the first two: a chat if it has messages."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    MESSAGE = "message"
    COUNTED_MESSAGE = "counted message"
    EITHER = "either"


_BODIES: Mapping[RequestKind, type[WholeBody]] = {
    RequestKind.CHAT: ChatBody,
    RequestKind.COMPLETION: CompletionBody,
    RequestKind.RESPONSE: responses.ResponseBody,
    RequestKind.MESSAGE: messages.MessageBody,
    RequestKind.COUNTED_MESSAGE: messages.CountedBody,
}


EVERYWHERE = (
    *("cache_salt", "priority", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("truncate_prompt_tokens", "thinking_token_budget", "prompt_cache_key", "user"),
)
"""Fields of chats about isolation, limits and sessions, which mean the same on every endpoint."""
_CHATS = frozenset({*ChatBody.model_fields, *ChatBody.not_supported} - {*LIMITS})
"""The fields of a chat, which it may also have with its conversation in another's shape."""


class AskedChat(NamedTuple):
    """A conversation, as chat templates have it, and what may be called in its answer."""

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    tools: ToolUse | None


class AskedTexts(NamedTuple):
    """The `prompt` of a completion: text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    adds_special_tokens: bool


class AskedSampling(NamedTuple):
    """What to sample. `drawn` are parameters by name, as far as they are given.

    `thinking_budget`: the most tokens of thinking; None: it is not limited.
    """

    drawn: Mapping[str, float]
    seed: int | None
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logit_bias: Mapping[str, float]
    thinking_budget: int | None
    grammar: Grammar | Gbnf | None


class MaxTokens(NamedTuple):
    """The most tokens of an answer: what the field `param` says, or `default`; None: what fits."""

    asked: int | None
    param: str
    default: int | None = None


class AskedOutput(NamedTuple):
    """What to output: `n` choices of each prompt, the likeliest of `best_of` where that is given.

    `logprobs` and `prompt_logprobs` are numbers of alternatives of each token (None: nothing is
    told). `scored_by` are the API's fields with which a prompt alone can be asked for.
    """

    n: int
    max_tokens: MaxTokens
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    is_chat: bool
    scored_by: Sequence[str]
    best_of: int | None = None
    is_echo: bool = False


class AnswerShape(NamedTuple):
    """How the answer is shown.

    `stop`: the strings that end it; with `shows_stop` they, and stop tokens, are a part of it.
    `prompt_logprobs`: the number of alternatives that are shown per token of a prompt, beside its
    own (None: nothing is). `repeated`: the fields of the request that the answer has too.
    With `hides_thinking` a chat is answered without what the model thinks.
    `client_tools`: what the client calls functions that it knows as other tools. With
    `has_thought_codes` an item of thinking has its text as a code too. `ignored_fields`
    are some of those that the server does not know, `left_out` kinds of parts that it does not
    have.
    """

    is_stream: bool = False
    usage_events: UsageEvents = UsageEvents.NONE
    has_logprobs: bool = False
    prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    shows_special_tokens: bool = False
    hides_thinking: bool = False
    repeated: Mapping[str, Any] = {}
    client_tools: Mapping[str, ClientTool] = {}
    has_thought_codes: bool = False
    ignored_fields: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class Asked(NamedTuple):
    """Everything one body asks for. KV is shared with requests of the same `cache_salt` alone.

    `session`: what the client calls the session of the request; empty: it has no name for it.

    Of a prompt the last `most_prompt_tokens` are kept; None: all. `continues_prompt`: the answer's
    text goes straight on from the prompt's. `places`: where the client wrote the parts of a chat
    that another API's body became.
    """

    model: str | None
    prompt: AskedChat | AskedTexts
    most_prompt_tokens: int | None
    continues_prompt: bool
    priority: int
    cache_salt: str
    session: str
    sampling: AskedSampling
    output: AskedOutput
    shape: AnswerShape
    places: Places | None


class Words(NamedTuple):
    """What is said in the client's own words: by a chat that is another API's body, above all.

    `shown` are those fields of `AnswerShape`. With `is_message` it is one of `/v1/messages`: every
    message of the system is in the prompt, whatever the template does.
    """

    shown: Mapping[str, Any]
    places: Places | None = None
    is_message: bool = False


def asked_of(kind: RequestKind, raw: bytes) -> Asked:
    """Return what a body of any API asks for. Raises `InvalidRequest` naming the field at fault."""
    body = _parsed(kind, raw)
    if isinstance(body, ChatBody | CompletionBody):
        return asked_of_fields(body, Words({"ignored_fields": named_fields(body.unknown_fields())}))
    own = _CHATS if kind is RequestKind.CHAT else EVERYWHERE
    fields, words, places = _as_chat(body, own)
    try:
        return asked_of_fields(parse_fields(ChatBody, fields), words)
    except InvalidRequest as error:
        raise places.in_words_of_client(error) from None


def _parsed(kind: RequestKind, raw: bytes) -> WholeBody:
    text = checked_text(raw)
    if kind is RequestKind.EITHER:
        has_messages = parse_body(AnyBody, text).messages is not None
        kind = RequestKind.CHAT if has_messages else RequestKind.COMPLETION
    try:
        return parse_body(_BODIES[kind], text)
    except InvalidRequest as error:
        # Cursor's agent sends chats in the shape of another endpoint, and reads a chat's answer.
        if kind is not RequestKind.CHAT or error.param != "messages" or not _has_input(text):
            raise
    return parse_body(responses.ResponseBody, text)


def _has_input(text: JsonText) -> bool:
    """Return whether a body has the conversation of `/v1/responses`, and not that of a chat."""
    body = parse_body(AnyBody, text)
    return body.messages is None and (body.model_extra or {}).get("input") is not None


def _as_chat(body: WholeBody, own: Collection[str]) -> tuple[dict[str, Any], Words, Places]:
    """Return the fields of the chat that another API's body becomes, and what is said of it.

    `own` are the fields of chats that the body may have as they are; they count before others.
    """
    left_out = LeftOut()
    extra = {name: value for name, value in (body.model_extra or {}).items() if name in own}
    for name in body.fields_left_out():
        left_out.add(f"the field {name!r}")
    shown: dict[str, Any] = {}
    if isinstance(body, responses.ResponseBody):
        shown["repeated"] = responses.repeated_fields(body)
        shown["has_thought_codes"] = responses.wants_codes(body)
        places = Places(
            {path: at for path, at in responses.PLACES.items() if path.split(".")[0] not in extra}
        )
        chat, shown["client_tools"] = responses.chat_of_response(body, places, left_out)
    else:
        assert isinstance(body, messages.MessageBody)
        places = Places(messages.PLACES)
        chat = messages.chat_of_message(body, places, left_out)
    ignored = named_fields([name for name in body.unknown_fields() if name not in own])
    shown |= {"ignored_fields": ignored, "left_out": left_out.kinds}
    chat |= {name: value for name, value in extra.items() if value is not None}
    fields = {name: value for name, value in chat.items() if value is not None}
    words = Words(shown, places, is_message=isinstance(body, messages.MessageBody))
    return fields, words, places


def asked_of_fields(body: ChatBody | CompletionBody, words: Words) -> Asked:
    """Return what a chat or a completion asks for. Raises `InvalidRequest`."""
    if isinstance(body, ChatBody):
        output = _output_of_chat(body, words)
    else:
        output = _output_of_completion(body)
    shape = AnswerShape(
        is_stream=bool(body.stream),
        usage_events=_usage_events(body),
        has_logprobs=output.logprobs is not None,
        prompt_logprobs=output.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        stop=_stop_strings(body.stop),
        shows_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        shows_special_tokens=body.skip_special_tokens is False,
        hides_thinking=isinstance(body, ChatBody) and hides_thinking(body),
        **words.shown,
    )
    most, seed = _most_prompt_tokens(body), _seed(body.seed)
    prompt: AskedChat | AskedTexts
    if isinstance(body, ChatBody):
        left_out = LeftOut()
        prompt = _chat(body, words, left_out)
        shape = shape._replace(left_out=(*shape.left_out, *left_out.kinds))
        continues_prompt = prompt.options.continues_final_message
    else:
        prompt = AskedTexts(body.prompt, body.add_special_tokens is not False)
        continues_prompt = True
    priority, cache_salt = body.priority or 0, body.cache_salt or ""
    check_priority(priority)
    check_cache_salt(cache_salt)
    return Asked(
        model=body.model,
        prompt=prompt,
        most_prompt_tokens=most,
        continues_prompt=continues_prompt,
        priority=priority,
        cache_salt=cache_salt,
        session=_session(body),
        sampling=_sampling(body, seed),
        output=output,
        shape=shape,
        places=words.places,
    )


def _sampling(body: ChatBody | CompletionBody, seed: int | None) -> AskedSampling:
    return AskedSampling(
        drawn={one: given for one in _DRAWN if (given := getattr(body, one)) is not None},
        seed=seed,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or (),
        allowed_token_ids=body.allowed_token_ids or (),
        bad_words=body.bad_words or (),
        logit_bias=body.logit_bias or {},
        thinking_budget=thinking_budget(body) if isinstance(body, ChatBody) else None,
        grammar=grammar_of(body),
    )


def _output_of_chat(body: ChatBody, words: Words) -> AskedOutput:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    num_top = _checked_logprobs(body.top_logprobs or 0, "top_logprobs")
    newer = body.max_completion_tokens
    limit = (
        _limit(body.max_tokens, "max_tokens")
        if newer is None
        else _limit(newer, "max_completion_tokens")
    )
    return AskedOutput(
        n=1 if body.n is None else body.n,
        max_tokens=limit,
        min_tokens=body.min_tokens or 0,
        logprobs=num_top if body.logprobs else None,
        prompt_logprobs=_prompt_logprobs(body),
        is_chat=True,
        scored_by=("prompt_logprobs",) if words.places is None else (),
    )


def _output_of_completion(body: CompletionBody) -> AskedOutput:
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of > n and body.stream:
        raise InvalidRequest("best_of above n cannot be streamed", param="best_of")
    if body.logprobs is not None:
        _checked_logprobs(body.logprobs, "logprobs")
    return AskedOutput(
        n=n,
        best_of=body.best_of,
        max_tokens=_limit(body.max_tokens, "max_tokens", COMPLETION_MAX_TOKENS),
        min_tokens=body.min_tokens or 0,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        is_chat=False,
        is_echo=bool(body.echo),
        scored_by=("echo", "prompt_logprobs"),
    )


def _limit(asked: int | None, param: str, default: int | None = None) -> MaxTokens:
    return MaxTokens(None, param) if asked == _OPEN else MaxTokens(asked, param, default)


def _chat(body: ChatBody, words: Words, left_out: LeftOut) -> AskedChat:
    tools = tool_use(
        body.tools,
        body.tool_choice,
        is_parallel=body.parallel_tool_calls,
        left_out=left_out,
    )
    functions = tuple(tool.as_json() for tool in tools.tools) if tools else ()
    messages = template_messages(body.messages, left_out)
    options = template_options(body, functions, keeps_system=words.is_message)
    return AskedChat(messages, options, tools)


def _session(body: SamplingFields) -> str:
    """Return the name of the session. Raises `InvalidRequest` for one that is too long."""
    names = [checked_session(getattr(body, field) or "", field) for field in SESSION_FIELDS]
    return next(filter(None, names), "")


def _seed(asked: int | None) -> int | None:
    """Return a seed as an unsigned number of 64 bits; None where one is to be drawn."""
    if asked in (None, _OPEN):
        return None
    if not -(2**63) <= asked < 2**64:
        raise InvalidRequest(f"seed is {asked}: wanted -2^63 to 2^64 - 1", param="seed")
    return asked % 2**64


def _checked_logprobs(value: int, param: str) -> int:
    """Return a number of alternatives per token. Raises `InvalidRequest` out of its bounds."""
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{param} is {value}: wanted 0 to {MAX_LOGPROBS}", param=param)
    return value


def _prompt_logprobs(body: SamplingFields) -> int | None:
    if body.prompt_logprobs is None:
        return None
    if body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return _checked_logprobs(body.prompt_logprobs, "prompt_logprobs")


def _most_prompt_tokens(body: SamplingFields) -> int | None:
    most = body.truncate_prompt_tokens
    if most is not None and most < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}: wanted at least 1", param="truncate_prompt_tokens"
        )
    return most


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(stops)} strings: wanted at most {MAX_STOP_STRINGS}", param="stop"
        )
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"stop holds an empty or too long string: wanted 1 to {MAX_STOP_CHARS} characters",
            param="stop",
        )
    return stops


def _usage_events(body: SamplingFields) -> UsageEvents:
    if body.stream_options is None or not body.stream_options.include_usage:
        return UsageEvents.NONE
    is_each = body.stream_options.continuous_usage_stats
    return UsageEvents.EACH if is_each else UsageEvents.LAST
