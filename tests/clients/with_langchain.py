"""`langchain-openai`: `bind_tools`, results of tools in the history, `with_structured_output`."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(
    model="tiny", base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="x", max_retries=0
)
CALL = '«<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>»'


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


bound = model.bind_tools([get_weather])
history = [HumanMessage(f"Look it up: {CALL}")]
answer = bound.invoke(history)
(call,) = answer.tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
history += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
assert bound.invoke(history).content == "It is sunny."

whole = None
for chunk in bound.stream(history[:1]):
    whole = chunk if whole is None else whole + chunk
assert whole.tool_calls[0]["args"] == {"city": "Paris"}, whole


class Mood(BaseModel):
    """How somebody feels."""

    mood: str


spelled = '«{"mood": "good"}»'
for method in ("json_schema", "json_mode"):
    parsed = model.with_structured_output(Mood, method=method).invoke(spelled)
    assert parsed == Mood(mood="good"), (method, parsed)
called = '«<tool_call>\n{"name": "Mood", "arguments": {"mood": "good"}}\n</tool_call>»'
parsed = model.with_structured_output(Mood, method="function_calling").invoke(called)
assert parsed == Mood(mood="good"), parsed

responses = ChatOpenAI(
    model="tiny",
    base_url=f"http://127.0.0.1:{sys.argv[1]}/v1",
    api_key="x",
    use_responses_api=True,
    max_retries=0,
)
assert responses.invoke("«Bonjour»").text == "Bonjour"
(call,) = responses.bind_tools([get_weather]).invoke(CALL).tool_calls
assert call["args"] == {"city": "Paris"}
