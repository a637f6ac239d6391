"""The request bodies, and how every field is treated.

Types are strict: `"5"` is not a number and `true` is not an integer. Fields fall in five groups:

- served: they do what OpenAI's (or, where OpenAI has none, vLLM's) documentation says; `priority`
  is -1000 to 1000, larger goes first;
- harmless: they ask for nothing that changes the answer, and are ignored;
- not supported: they would change the answer. A value that asks for nothing (null, an empty list,
  the default of the servers that have the field) is accepted; any other is refused with the field's
  name;
- left out: they would change the answer, and agents send them always. They are ignored, and named
  in the plan, so that the router can log or refuse them;
- unknown: ignored, and named in the plan, so that the router can log or refuse them
  (`strict_fields`). Clients add fields of other servers, and cannot leave them out.

Some values have a type of their own in some languages: a whole number that is written as `64.0` is
a number of its field, and an empty list in the place of an object, which is how PHP writes one that
is empty, asks for nothing. What a tool returned may be any JSON: it becomes its text.

Lists stop at their first fault: each fault is an object, and a body can hold millions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from common.errors import InvalidRequest
from router.api.bodies.json_text import JsonText, check_utf8, with_whole_characters

Nothing = tuple[Any, ...]

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The names that the endpoints have for the most tokens of an answer."""
_MAX_NAME_CHARS = 200
MAX_SESSION_CHARS = 256

_MOST_EXACT = 2.0**53
"""The largest number up to which each whole number has a float of its own."""

_UNION_ARMS = ("str", "list[str]", "list[any]", "bool")
"""How pydantic names the member of `str | list` that it tried, as if it were a field."""
_WANTED = {
    "stop": "text or a list of texts",
    "chat_template_kwargs": "text, a number, true, false or null",
    "thinking": "true, false or an object",
    "reasoning": "true, false or an object",
}
"""The types that fields of several ones may have, where it is not text or a list."""


def _whole(value: Any) -> Any:
    """Return a float that is a whole number as an integer, and anything else as it is."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= _MOST_EXACT
    return int(value) if is_whole else value


def _nothing_if_empty(value: Any) -> Any:
    """Return None for an empty list in the place of an object, and anything else as it is."""
    return None if value == [] else value


def data_as_text(content: Any) -> Any:
    """Return what a tool returned as JSON, where it is neither text nor a list with parts of it."""
    is_nothing = content is None or content == []
    if is_nothing or isinstance(content, str):
        return content
    if isinstance(content, list) and any(map(_may_be_part, content)):
        return content
    return json.dumps(content, ensure_ascii=False)


def _may_be_part(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("type"), str)


def _content_of(content: Any, message: ValidationInfo) -> Any:
    """Return the content of a message; of a tool it may be data. A list of texts has parts."""
    are_texts = isinstance(content, list) and all(isinstance(one, str) for one in content)
    is_data = message.data.get("role") == "tool" and not are_texts
    return data_as_text(content) if is_data else content


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, which some languages write with a fraction of zero."""

AnyT = TypeVar("AnyT")
Maybe = Annotated[AnyT | None, BeforeValidator(_nothing_if_empty)]
"""An object that may be left out."""


class Body(BaseModel):
    """A body or a part of one. Fields that are not declared are kept in `model_extra`."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    def refuse_unsupported(self) -> None:
        """Raise `InvalidRequest` for a field that would change the answer."""


class StreamOptions(Body):
    """What a stream carries besides the answer: usage at its end, or with every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class WholeBody(Body):
    """The body of a request, with the fields that it may have besides those that are declared."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    not_supported: ClassVar[Mapping[str, Nothing]] = {}
    left_out: ClassVar[Mapping[str, Nothing]] = {}

    def unknown_fields(self) -> list[str]:
        """Return the paths of the fields that are in no group, each once, in no order."""
        if not self.model_extra:
            return []
        known = self.harmless.union(self.not_supported, self.left_out, LIMITS)
        return [name for name in self.model_extra if name not in known]

    def fields_left_out(self) -> list[str]:
        """Return the fields that are left out and ask for something."""
        extra = self.model_extra or {}
        return [name for name, nothing in self.left_out.items() if extra.get(name) not in nothing]

    def refuse_unsupported(self) -> None:
        """Raise `InvalidRequest` for a field that would change the answer.

        A limit that has its name from another endpoint is taken, unless the two are different.
        """
        extra = self.model_extra
        if not extra:
            return
        own = next(name for name in LIMITS if name in type(self).model_fields)
        for name in LIMITS:
            if extra.get(name) is not None:
                self._take_limit(name, extra[name], own)
        for name, nothing in self.not_supported.items():
            if name in extra and extra[name] not in nothing:
                raise InvalidRequest(f"{name} is not supported by this server", param=name)

    def _take_limit(self, name: str, most: Any, own: str) -> None:
        most = _whole(most)
        if not isinstance(most, int) or isinstance(most, bool):
            raise InvalidRequest(f"{name}: input should be a valid integer", param=name)
        given = [
            (other, getattr(self, other))
            for other in LIMITS
            if other in type(self).model_fields and getattr(self, other) is not None
        ]
        for other, value in given:
            if value != most:
                raise InvalidRequest(
                    f"{name} is {most} and {other} is {value}: wanted one limit", param=name
                )
        if not given:
            setattr(self, own, most)


class SamplingFields(WholeBody):
    """Fields that both APIs have. Absent and null mean the same: the default."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        (
            *("metadata", "store", "service_tier", "safety_identifier"),
            *("guided_decoding_backend", "guided_whitespace_pattern"),
            *("prompt_cache_retention", "request_id", "rid"),
        )
    )
    not_supported: ClassVar[Mapping[str, Nothing]] = {
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "kv_transfer_params": (None,),
        "lora_path": (None,),
        "spaces_between_special_tokens": (None, True),
        "return_tokens_as_token_ids": (None, False),
        "stop_regex": (None, "", []),
        "custom_logit_processor": (None, "", []),
        "logits_processors": (None, []),
    }

    model: str | None = None
    n: Whole | None = None
    stream: bool | None = None
    stream_options: Maybe[StreamOptions] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    max_tokens: Whole | None = None
    priority: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    return_token_ids: bool | None = None
    logit_bias: Maybe[dict[str, float]] = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    # Read by `response_format`, which names what is wrong in them.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None

    def unknown_fields(self) -> list[str]:
        """Return the paths of the fields that are in no group, each once, in no order."""
        return super().unknown_fields() + [
            f"stream_options.{name}"
            for name in (self.stream_options and self.stream_options.model_extra) or ()
            if name != "include_obfuscation"
        ]


class CalledFunction(Body):
    """The function of a call; `arguments` is a text, as a rule of a JSON object, or the object."""

    name: str
    arguments: Any = "{}"


class ToolCall(Body):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    """One turn. What answers carry besides these fields comes back in a client's history."""

    not_supported: ClassVar[tuple[str, ...]] = ("audio", "function_call")
    harmless: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[Any] | None, BeforeValidator(_content_of)] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class ChatBody(SamplingFields):
    """`POST /v1/chat/completions`."""

    harmless: ClassVar[frozenset[str]] = SamplingFields.harmless | {
        "prediction",
    }
    not_supported: ClassVar[Mapping[str, Nothing]] = {
        **SamplingFields.not_supported,
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
        "documents": (None, []),
        "chat_template": (None,),
        "add_special_tokens": (None, False),
        "echo": (None, False),
        "best_of": (None, 1),
        # Reasoning is always a field of its own where a model has it.
        "separate_reasoning": (None, True),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    chat_template_kwargs: Maybe[dict[str, bool | int | float | str | None]] = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Maybe[bool | dict[str, Any]] = None
    reasoning: Maybe[bool | dict[str, Any]] = None
    include_reasoning: bool | None = None
    thinking_token_budget: Whole | None = None
    thinking_budget: Whole | None = None
    thinking_budget_tokens: Whole | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Read by `tool_fields`, which names what is wrong in them.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def unknown_fields(self) -> list[str]:
        """Return the paths of the fields that are in no group; of messages without their index."""
        names = {name for message in self.messages for name in message.model_extra or ()}
        names -= ChatMessage.harmless.union(ChatMessage.not_supported) if names else set()
        return super().unknown_fields() + [f"messages.{name}" for name in names]


class CompletionBody(SamplingFields):
    """`POST /v1/completions`."""

    not_supported: ClassVar[Mapping[str, Nothing]] = {
        **SamplingFields.not_supported,
        "suffix": (None, ""),
    }

    prompt: str | list[Any]
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    add_special_tokens: bool | None = None


class AnyBody(Body):
    """A body of either API, of which nothing is known yet."""

    messages: Any = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], text: JsonText) -> BodyT:
    """Parse a body. Raises `InvalidRequest` naming the first field at fault."""

    def parse() -> BodyT:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
                raise
        check_utf8(text)
        return kind.model_validate_json(with_whole_characters(text))

    return _checked(parse)


def parse_fields(kind: type[BodyT], fields: Mapping[str, Any]) -> BodyT:
    """Parse a body from its fields. Raises `InvalidRequest` naming the first field at fault."""
    return _checked(lambda: kind.model_validate(fields))


def checked_session(name: str, param: str) -> str:
    """Return a session's name. Raises `InvalidRequest` for one that is too long."""
    if len(name) > MAX_SESSION_CHARS:
        raise InvalidRequest(
            f"{param} has {len(name)} characters: wanted at most {MAX_SESSION_CHARS}", param=param
        )
    return name


def _checked(parse: Callable[[], BodyT]) -> BodyT:
    try:
        parsed = parse()
    except ValidationError as error:
        raise _invalid(error) from None
    parsed.refuse_unsupported()
    return parsed


def _invalid(error: ValidationError) -> InvalidRequest:
    """Return the first violation, naming the field as the client wrote it."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return InvalidRequest(
            f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
        )
    if kind == "model_type" and not first["loc"]:
        return InvalidRequest("the body is not a JSON object")
    path = list(first["loc"])
    if path[-1] in _UNION_ARMS:
        name = _name(path[:-1])
        wanted = _WANTED.get(str(path[0]), "text or a list")
        return InvalidRequest(f"{name} has the wrong type: wanted {wanted}", param=name)
    name = _name(path)
    if kind == "missing":
        return InvalidRequest(f"{name} is missing", param=name)
    if kind == "finite_number":
        return InvalidRequest(f"{name} is not a finite number", param=name)
    return InvalidRequest(f"{name}: {message[:1].lower()}{message[1:]}", param=name)


def _name(path: list[int | str]) -> str:
    """Return a field's name as in an answer, which does not repeat megabytes of a wrong name."""
    return ".".join(map(str, path))[:_MAX_NAME_CHARS]
