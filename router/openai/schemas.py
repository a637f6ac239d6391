"""The request bodies, and how every field is treated.

Types are strict: `"5"` is not a number and `true` is not an integer. Fields fall in four groups:

- served: they do what OpenAI's (or, for `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`,
  `ignore_eos` and `min_tokens`, vLLM's) documentation says; `priority` is -1000 to 1000, larger
  goes first;
- harmless: they ask for nothing that changes the answer, and are accepted and ignored;
- not supported: they would change the answer. A value that asks for nothing (null, an empty
  list, the default) is accepted; any other is refused with the field's name;
- unknown: refused with the field's name, as OpenAI does, because a misspelt field that is
  ignored is a wrong answer that looks right.

Lists stop at their first fault: each fault is an object, and a body can hold millions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import InvalidRequest
from router.openai.json_limits import check_structure

Nothing = tuple[Any, ...]

_MAX_NAME_CHARS = 200

_UNION_ARMS = ("str", "list[str]", "list[any]")
"""How pydantic names the member of `str | list` that it tried, as if it were a field."""


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class StreamOptions(_Body):
    """What a stream carries besides the answer. `include_obfuscation` pads events: harmless."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class SamplingFields(_Body):
    """Fields that both APIs have. Absent and null mean the same: the default."""

    not_supported: ClassVar[Mapping[str, Nothing]] = {}

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    priority: int | None = None

    # harmless
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    # not supported
    logit_bias: Any = None


class ChatMessage(_Body):
    """One turn. The fields after `name` appear in answers that clients send back as history."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Any] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None


class ChatBody(SamplingFields):
    """`POST /v1/chat/completions`."""

    not_supported: ClassVar[Mapping[str, Nothing]] = {
        "logit_bias": (None, {}),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # harmless
    prediction: Any = None
    parallel_tool_calls: Any = None

    # not supported
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(SamplingFields):
    """`POST /v1/completions`."""

    not_supported: ClassVar[Mapping[str, Nothing]] = {
        "logit_bias": (None, {}),
        "suffix": (None, ""),
        "best_of": (None, 1),
    }

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None

    # not supported
    suffix: Any = None
    best_of: Any = None


BodyT = TypeVar("BodyT", bound=SamplingFields)


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Parse `body`. Raises `InvalidRequest` naming the first field at fault."""
    check_structure(body)
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None
    for name, nothing in kind.not_supported.items():
        if getattr(parsed, name) not in nothing:
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
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
        wanted = "text or a list of texts" if name == "stop" else "text or a list"
        return InvalidRequest(f"{name} has the wrong type: wanted {wanted}", param=name)
    name = _name(path)
    if kind == "missing":
        return InvalidRequest(f"{name} is missing", param=name)
    if kind == "extra_forbidden":
        return InvalidRequest(f"{name} is not a field of this request", param=name)
    if kind == "finite_number":
        return InvalidRequest(f"{name} is not a finite number", param=name)
    return InvalidRequest(f"{name}: {message[:1].lower()}{message[1:]}", param=name)


def _name(path: list[int | str]) -> str:
    """Return a field's name as in an answer, which does not repeat megabytes of a wrong name."""
    return ".".join(map(str, path))[:_MAX_NAME_CHARS]
