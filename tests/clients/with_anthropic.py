"""`anthropic`: messages, streams, tools, thinking, errors."""

from __future__ import annotations

import sys

import anthropic

client = anthropic.Anthropic(
    base_url=f"http://127.0.0.1:{sys.argv[1]}", api_key="x", max_retries=0, timeout=20
)
CALL = '«<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>»'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}]
ASKED = {"model": "tiny", "max_tokens": 100}

said = client.messages.create(
    **ASKED, system="Be brief.", messages=[{"role": "user", "content": "«Bonjour»"}]
)
assert said.content[0].text == "Bonjour"
assert (said.stop_reason, said.usage.output_tokens > 1) == ("end_turn", True)

asked = [{"role": "user", "content": "«Bonjour»"}]
counted = client.messages.count_tokens(model="tiny", system="Be brief.", messages=asked)
assert counted.input_tokens == said.usage.input_tokens

history = [{"role": "user", "content": f"Look it up: {CALL}"}]
with client.messages.stream(**ASKED, messages=history, tools=TOOLS) as stream:
    kinds = {event.type for event in stream}
    called = stream.get_final_message()
assert {"input_json", "content_block_stop", "message_stop"} <= kinds, kinds
(block,) = called.content
assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Paris"})
assert called.stop_reason == "tool_use"

result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
history += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
again = client.messages.create(**ASKED, messages=history, tools=TOOLS)
assert again.content[0].text == "It is sunny."

thinks = [{"role": "user", "content": "«hm</think>Yes»"}]
thinking = {"type": "enabled", "budget_tokens": 1024}
with client.messages.stream(**ASKED, messages=thinks, thinking=thinking) as stream:
    thought = stream.get_final_message()
assert [block.type for block in thought.content] == ["thinking", "text"]
assert (thought.content[0].thinking, thought.content[1].text) == ("hm", "Yes")
whole = client.messages.create(**ASKED, messages=thinks, thinking=thinking)
assert thought.content[0].signature == whole.content[0].signature != ""


slow = [{"role": "user", "content": "Take your time: «Bonjour»"}]
with client.messages.stream(**ASKED, messages=slow) as stream:
    assert stream.get_final_text() == "Bonjour"
raw = client.messages.create(**ASKED, messages=slow, stream=True)
assert next(iter(raw)).type == "message_start", "pings are no events of this client"


def refusal(**fields: object) -> anthropic.APIStatusError:
    """Return the error that a request gets."""
    try:
        client.messages.create(**(ASKED | fields))
    except anthropic.APIStatusError as error:
        return error
    raise AssertionError(f"answered: {fields}")


unknown = refusal(model="other", messages=thinks)
assert isinstance(unknown, anthropic.NotFoundError)
assert unknown.body["error"]["type"] == "not_found_error"
empty = refusal(messages=[])
assert isinstance(empty, anthropic.BadRequestError)
assert "messages" in empty.message
