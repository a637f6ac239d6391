"""Messages of a chat request as the plain dictionaries that chat templates know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.json_text import check_depth, with_whole_characters
from router.api.bodies.schemas import ChatBody, ChatMessage, ToolCall
from router.api.bodies.thinking import THINKING_VARIABLES, effort_of, thinking_variables
from router.api.bodies.unknown_fields import LeftOut
from router.text.chat.chat_template import ChatOptions
from router.tools.earlier_calls import with_results_in_order

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Parts that are text, also those that have the names of `/v1/responses`."""
_MEDIA_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "file"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sound"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Parts that are no text, and what the model is told in their place."""
_THOUGHT_PARTS = ("thinking", "redacted_thinking")
"""Parts of an answer that are not its text; of the second nothing can be read."""

MAX_VARIABLES = 32
MAX_VARIABLE_CHARS = 256
"""Most characters of a variable's name and of its value: templates may repeat them."""
MAX_ARGUMENTS_DEPTH = 64
"""Objects and lists within each other in the arguments of a call; templates recurse into them."""


def template_messages(
    messages: Sequence[ChatMessage], left_out: LeftOut
) -> list[Mapping[str, Any]]:
    """Return role, content as text, and the other fields of a message where they are given.

    Results come after their calls, in the order of these.

    The arguments of calls are objects, as templates expect them. `developer` is OpenAI's newer name
    for `system`; templates know `system` alone. Several text parts become lines of one text. What
    is not text is `left_out` where a tool returned it, and the model is told so: no client takes it
    out of its history again. Raises `InvalidRequest` for anything else that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty: wanted at least one message", param="messages")
    plain = [_template_message(i, message, left_out) for i, message in enumerate(messages)]
    return with_results_in_order(plain)


def _check_variables(variables: Mapping[str, Any]) -> None:
    if len(variables) > MAX_VARIABLES:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(variables)} fields: wanted at most {MAX_VARIABLES}",
            param="chat_template_kwargs",
        )
    for name, value in variables.items():
        if len(name) > MAX_VARIABLE_CHARS or len(str(value)) > MAX_VARIABLE_CHARS:
            raise InvalidRequest(
                f"chat_template_kwargs.{name[:40]} is too long: wanted at most "
                f"{MAX_VARIABLE_CHARS} characters",
                param="chat_template_kwargs",
            )
        # To a template any text is true.
        is_quoted = isinstance(value, str) and value.lower() in ("true", "false")
        if name in THINKING_VARIABLES and is_quoted:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is the text {value!r}: wanted true or false, "
                "without quotes",
                param=f"chat_template_kwargs.{name}",
            )


def template_options(
    body: ChatBody, tools: Sequence[Mapping[str, Any]], *, keeps_system: bool
) -> ChatOptions:
    """Return the arguments of a chat template besides the messages.

    Raises `InvalidRequest` for a final message that cannot be continued.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: wanted one of them",
            param="continue_final_message",
        )
    if continues and body.messages[-1].role != "assistant":
        raise InvalidRequest(
            f"continue_final_message is true and the last message's role is "
            f"{body.messages[-1].role}: wanted assistant",
            param="continue_final_message",
        )
    variables = dict(body.chat_template_kwargs or {})
    effort = effort_of(body)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    _check_variables(variables)
    of_fields = thinking_variables(body)
    if variables.keys().isdisjoint(THINKING_VARIABLES):
        variables |= of_fields
    return ChatOptions(
        variables=variables,
        has_generation_prompt=body.add_generation_prompt is not False,
        continues_final_message=continues,
        tools=tools,
        keeps_system=keeps_system,
    )


def _template_message(index: int, message: ChatMessage, left_out: LeftOut) -> dict[str, Any]:
    for name in message.not_supported:
        if (message.model_extra or {}).get(name):
            field = f"messages.{index}.{name}"
            raise InvalidRequest(f"{field} is not supported by this server", param=field)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(f"messages.{index}.content", message, left_out),
    }
    if message.name is not None:
        plain["name"] = message.name
    thought = message.reasoning_content
    if thought is None:
        thought = message.reasoning  # vLLM's name for it
    if thought is None:
        thought = _thought_of_parts(f"messages.{index}.content", message)
    if thought is not None:
        plain["reasoning_content"] = thought
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            field = f"messages.{index}.tool_calls"
            raise InvalidRequest(
                f"{field} belongs to a message of the role {message.role}: wanted assistant",
                param=field,
            )
        plain["tool_calls"] = [
            _template_call(f"messages.{index}.tool_calls.{number}", call)
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _template_call(field: str, call: ToolCall) -> dict[str, Any]:
    arguments = _arguments(f"{field}.function.arguments", call.function.arguments)
    known = {} if call.id is None else {"id": call.id}
    function = {"name": call.function.name, "arguments": arguments}
    return {**known, "type": "function", "function": function}


def _arguments(field: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call that was made earlier, none where its text is no object.

    A call that `max_tokens` cut off comes back in a client's history. Templates know objects alone.
    """
    if arguments is None or isinstance(arguments, str):
        try:
            # Escapes in the text may spell what is no text, and a tokenizer takes none of that.
            arguments = json.loads(with_whole_characters((arguments or "{}").encode()))
        except ValueError:
            arguments = {}
        except RecursionError:
            raise InvalidRequest(
                f"{field} has more than {MAX_ARGUMENTS_DEPTH} levels: wanted at most "
                f"{MAX_ARGUMENTS_DEPTH}",
                param=field,
            ) from None
        if not isinstance(arguments, dict):
            arguments = {}
    if arguments == []:  # as PHP writes an object without fields
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{field} is of type {type(arguments).__name__}: wanted the text of a JSON object",
            param=field,
        )
    check_depth(arguments, MAX_ARGUMENTS_DEPTH, field)
    return arguments


def _text(field: str, message: ChatMessage, left_out: LeftOut) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role in ("assistant", "tool"):  # which called alone, or returned nothing
            return ""
        raise InvalidRequest(f"{field} is missing", param=field)
    parts = enumerate(content)
    texts = (_text_of_part(f"{field}.{at}", part, message.role, left_out) for at, part in parts)
    return "\n".join(text for text in texts if text is not None)


def _text_of_part(field: str, part: Any, role: str, left_out: LeftOut) -> str | None:
    """Return a part of a message's content as text; None for a thought of the assistant."""
    if isinstance(part, str):  # as LiteLLM and LangChain write a history, and vLLM takes it
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(
            f'{field} is not a content part: wanted text or {{"type": "text", "text": …}}',
            param=field,
        )
    kind = part["type"]
    # What the assistant thought and refused comes back in a client's history.
    if role == "assistant" and kind in _THOUGHT_PARTS:
        return None
    if role == "tool" and kind in _MEDIA_PARTS:
        left_out.add_type("parts of results", kind)
        return f"[{_MEDIA_PARTS[kind]} left out: this server takes text alone]"
    if kind in _TEXT_PARTS:
        return _string(part, "text", field)
    if role == "assistant" and kind == "refusal":
        return _string(part, kind, field)
    raise InvalidRequest(
        f"{field}.type is {kind[:40]!r}: this server takes text alone", param=f"{field}.type"
    )


def _thought_of_parts(field: str, message: ChatMessage) -> str | None:
    """Return what the assistant thought, where that is in parts of its content."""
    if message.role != "assistant" or not isinstance(message.content, list):
        return None
    thoughts = [
        _string(part, "thinking", f"{field}.{index}")
        for index, part in enumerate(message.content)
        if isinstance(part, dict) and part.get("type") == "thinking"
    ]
    return "".join(thoughts) if thoughts else None


def _string(part: Mapping[str, Any], name: str, field: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name} is not text", param=f"{field}.{name}")
    return value
