"""What tools returned: nothing, any JSON, an error, images, which are left out; and documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http.agents import (
    CHATS,
    MESSAGES,
    OWN,
    RESPONSES,
    TEXT,
    USER,
    body_of,
    edge_that_says,
    message,
    post,
    prompt_of,
    warnings,
)

CALLED: dict[str, list[Any]] = {
    CHATS: [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1"},
    ],
    RESPONSES: [
        USER,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1"},
    ],
    MESSAGES: [
        USER,
        message("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        message("user", {"type": "tool_result", "tool_use_id": "1"}),
    ],
}
"""A call whose tool returned nothing, by endpoint."""


@pytest.mark.covers("J12")
@pytest.mark.parametrize(
    "nothing", [{}, {"content": None, "output": None}, {"content": [], "output": []}]
)
@pytest.mark.parametrize("path", CALLED)
async def test_a_tool_may_have_returned_nothing(path: str, nothing: dict[str, Any]) -> None:
    *before, last = CALLED[path]
    result = last["content"][0] if path == MESSAGES else last
    field = "output" if path == RESPONSES else "content"
    given = {**result, **{name: value for name, value in nothing.items() if name == field}}
    last = message("user", given) if path == MESSAGES else given
    edge = edge_that_says()
    name = "input" if path == RESPONSES else "messages"
    await post(edge, path, {**body_of(path), name: [*before, last]})
    assert "<tool_response></tool_response>" in prompt_of(edge)


@pytest.mark.covers("J28")
@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ({"temp": 21, "where": "Köln"}, '{"temp": 21, "where": "Köln"}'),
        ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
        ([1, None], "[1, null]"),
        ({}, "{}"),
        (0, "0"),
        (4.5, "4.5"),
        (False, "false"),
        (["a", 1, None], '["a", 1, null]'),
        ([{"id": 1}, "a"], '[{"id": 1}, "a"]'),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
@pytest.mark.parametrize("path", CALLED)
async def test_what_a_tool_returned_may_be_any_json(path: str, returned: Any, shown: str) -> None:
    assert f"<tool_response>{shown}</tool_response>" in await prompt_after(path, returned)


@pytest.mark.covers("J28")
@pytest.mark.parametrize(
    ("path", "shown"), [(CHATS, "a\nb"), (RESPONSES, '["a", "b"]'), (MESSAGES, '["a", "b"]')]
)
async def test_a_list_of_texts_is_data_where_texts_are_no_parts(path: str, shown: str) -> None:
    assert f"<tool_response>{shown}</tool_response>" in await prompt_after(path, ["a", "b"])


async def prompt_after(path: str, returned: Any) -> str:
    """Return the prompt of a conversation whose tool returned this."""
    *before, last = CALLED[path]
    if path == MESSAGES:
        last = message("user", last["content"][0] | {"content": returned})
    else:
        last = last | {"output" if path == RESPONSES else "content": returned}
    edge = edge_that_says()
    name = "input" if path == RESPONSES else "messages"
    await post(edge, path, {**body_of(path), name: [*before, last]})
    return prompt_of(edge)


# --- images that tools returned -------------------------------------------------------------------

PICTURE: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
SHOWN = "data:image/png;base64,iVBORw0KGgo="
RESULTS: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"type": "image", "source": PICTURE}, "image"),
    (MESSAGES, {"type": "document", "source": PICTURE}, "file"),
    (RESPONSES, {"type": "input_image", "image_url": SHOWN}, "image"),
    (RESPONSES, {"type": "input_file", "file_data": "x"}, "file"),
    (CHATS, {"type": "image_url", "image_url": {"url": SHOWN}}, "image"),
    (CHATS, {"type": "file", "file": {"file_data": "x"}}, "file"),
    (CHATS, {"type": "input_audio", "input_audio": {"data": "x"}}, "sound"),
    (CHATS, {"type": "video_url", "video_url": {"url": SHOWN}}, "video"),
    (RESPONSES, {"type": "input_audio", "input_audio": {"data": "x"}}, "sound"),
    (RESPONSES, {"type": "input_video", "video_url": SHOWN}, "video"),
]


def with_result(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which a tool returned `parts`."""
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": list(parts)}
        return {"input": [USER, call, output]}
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": list(parts)}
        said = [USER, message("assistant", use), message("user", result)]
    else:
        made = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        result = {"role": "tool", "tool_call_id": "1", "content": list(parts)}
        said = [USER, {"role": "assistant", "tool_calls": made}, result]
    return {"max_tokens": 9, "messages": said}


@pytest.mark.covers("J22")
@pytest.mark.parametrize(("path", "part", "name"), RESULTS)
async def test_what_a_tool_returned_beside_text_is_left_out_and_told(
    path: str, part: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "Saved a.png."}
    edge = edge_that_says()
    for parts in ([part], [text, part], [part, text]):
        await post(edge, path, with_result(path, *parts))
    note = f"[{name} left out: this server takes text alone]"
    assert f"<tool_response>{note}\nSaved a.png.</tool_response>" in prompt_of(edge)
    (warning,) = warnings(caplog)
    assert f"parts of results of the type {part['type']!r}" in warning
    refused = await post(edge_that_says(strict_fields=True), path, with_result(path, part), 400)
    assert part["type"] in refused["error"]["message"]


@pytest.mark.covers("J22")
@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES])
async def test_what_a_user_shows_is_refused(path: str) -> None:
    (part,) = (one for at, one, name in RESULTS if at == path and name == "image")
    body = (
        {"input": [message("user", part)]}
        if path == RESPONSES
        else {
            "max_tokens": 9,
            "messages": [message("user", part)],
        }
    )
    error = await post(edge_that_says(), path, body, status=400)
    assert "takes text alone" in error["error"]["message"]
    odd = await post(edge_that_says(), path, with_result(path, {"type": "smell"}), status=400)
    assert "'smell'" in odd["error"]["message"]


# --- errors ---


@pytest.mark.covers("J27")
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "no such file"),
        ([TEXT | {"text": "a"}, TEXT | {"text": "b"}], "a\nb"),
        ("", ""),
        ([], ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("is_error", [True, False, None])
async def test_a_result_that_is_an_error_says_so(
    content: Any, shown: str, is_error: bool | None
) -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": is_error}
    said = [USER, message("assistant", use), message("user", result)]
    edge = edge_that_says()
    await post(edge, MESSAGES, body_of(MESSAGES, messages=said, tools=[OWN[MESSAGES]]))
    wanted = f"Error:\n{shown}" if is_error else shown
    assert f"<tool_response>{wanted}</tool_response>" in prompt_of(edge)


@pytest.mark.covers("J27")
async def test_an_image_of_a_call_that_failed_says_so() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    image = {"type": "image", "source": PICTURE}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image], "is_error": True}
    said = [USER, message("assistant", use), message("user", result)]
    edge = edge_that_says()
    await post(edge, MESSAGES, body_of(MESSAGES, messages=said, tools=[OWN[MESSAGES]]))
    assert "<tool_response>Error:\n[image left out" in prompt_of(edge)


@pytest.mark.covers("J27")
@pytest.mark.parametrize("text", [5, None, [], ["a"], [TEXT], {}])
async def test_a_part_without_text_of_a_call_that_failed_is_named(text: Any) -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    content = [TEXT | {"text": text}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": True}
    said = [USER, message("assistant", use), message("user", result)]
    body = body_of(MESSAGES, messages=said)
    error = await post(edge_that_says(), MESSAGES, body, status=400)
    assert "messages.2.content.0.content.0.text" in error["error"]["message"]


# --- documents ------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"type": "text", "media_type": "text/plain", "data": "Line one.\nTwo."}
BLOCKS = {"type": "content", "content": [{"type": "text", "text": "Line one.\nTwo."}]}
WHOLE = {"type": "content", "content": "Line one.\nTwo."}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize("source", [PLAIN, BLOCKS, WHOLE])
async def test_a_document_of_text_is_text(
    source: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    document = {
        "type": "document",
        "source": source,
        "title": "Notes",
        "context": "Of May",
        "citations": {"enabled": True},
    }
    edge = edge_that_says()
    asked = {
        "max_tokens": 9,
        "messages": [message("user", document, {"type": "text", "text": "What is it?"})],
    }
    await post(edge, MESSAGES, asked)
    shown = "Notes\nOf May\nLine one.\nTwo."
    assert f"{shown}\nWhat is it?" in prompt_of(edge)
    await post(edge, MESSAGES, with_result(MESSAGES, document))
    assert f"<tool_response>{shown}</tool_response>" in prompt_of(edge)
    bare = {"type": "document", "source": source, "title": None, "context": None}
    await post(edge, MESSAGES, with_result(MESSAGES, bare))
    assert "<tool_response>Line one.\nTwo.</tool_response>" in prompt_of(edge)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("source", "param", "words"),
    [
        (PDF, "source", "is 'base64 application/pdf': this server takes text alone"),
        ({"type": "url", "url": "https://a.example/b"}, "source", "is 'url'"),
        ({"type": "file", "file_id": "f"}, "source", "is 'file'"),
        (None, "source", "is '': this server takes text alone: wanted the document's text"),
        ({"type": "text", "data": 5}, "source.data", "is not text"),
        ({"type": "content", "content": 5}, "source.content", "is not a list"),
        ({"type": "content", "content": [{"type": "image"}]}, "source.content.0.type", "'image'"),
    ],
)
async def test_another_document_is_refused_with_what_it_is(
    source: Any, param: str, words: str
) -> None:
    asked = {"max_tokens": 9, "messages": [message("user", {"type": "document", "source": source})]}
    error = (await post(edge_that_says(), MESSAGES, asked, status=400))["error"]["message"]
    assert error.startswith(f"messages.0.content.0.{param} ")
    assert words in error
