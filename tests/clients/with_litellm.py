"""`litellm`: chats, streams, tools and formats as an OpenAI server, and messages as Anthropic's."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm
from pydantic import BaseModel

SERVER = f"http://127.0.0.1:{sys.argv[1]}"
CALL = '«<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>»'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]

for model, base in (("openai/tiny", f"{SERVER}/v1"), ("anthropic/tiny", SERVER)):
    asked = {"model": model, "api_base": base, "api_key": "x", "num_retries": 0, "max_tokens": 100}
    said = litellm.completion(**asked, messages=[{"role": "user", "content": "«Bonjour»"}])
    assert said.choices[0].message.content == "Bonjour", said
    messages = [{"role": "user", "content": CALL}]
    called = litellm.completion(**asked, messages=messages, tools=TOOLS)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.arguments.replace(" ", "") == '{"city":"Paris"}', call
    assert called.choices[0].finish_reason == "tool_calls"
    chunks = list(litellm.completion(**asked, messages=messages, tools=TOOLS, stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather", whole
    messages += [
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = litellm.completion(**asked, messages=messages, tools=TOOLS)
    assert again.choices[0].message.content == "It is sunny.", again


class Mood(BaseModel):
    """How somebody feels."""

    mood: str


JSON = '{"mood": "good"}'
for provider in ("openai", "hosted_vllm"):
    asked = {
        "model": f"{provider}/tiny",
        "api_base": f"{SERVER}/v1",
        "api_key": "x",
        "num_retries": 0,
        "messages": [{"role": "user", "content": f"«{JSON}»"}],
    }
    for form in ({"type": "json_object"}, Mood):
        said = litellm.completion(**asked, response_format=form)
        assert Mood.model_validate_json(said.choices[0].message.content).mood == "good", said
        pieces = litellm.completion(**asked, response_format=form, stream=True)
        whole = litellm.stream_chunk_builder(list(pieces))
        assert whole.choices[0].message.content == JSON, whole
    # The format reaches the server: one that cannot be followed is refused, with its place.
    described = {"name": "x", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}
    form, why = {"type": "json_schema", "json_schema": described}, ""
    try:
        litellm.completion(**asked, response_format=form)
    except litellm.BadRequestError as error:
        why = str(error)
    assert "#/properties/a: " in why, why
