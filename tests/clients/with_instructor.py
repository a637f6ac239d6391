"""`instructor` in its modes of tools, JSON and schemas."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="x", max_retries=0)


class Mood(BaseModel):
    """How somebody feels."""

    mood: str


JSON = '{"mood": "good"}'
CALL = f'<tool_call>\n{{"name": "Mood", "arguments": {JSON}}}\n</tool_call>'
for mode, text in (
    (instructor.Mode.TOOLS, CALL),
    (instructor.Mode.JSON, JSON),
    (instructor.Mode.JSON_SCHEMA, JSON),
    (instructor.Mode.MD_JSON, f"```json\n{JSON}\n```"),
):
    mood = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="tiny",
        response_model=Mood,
        max_retries=0,
        messages=[{"role": "user", "content": f"«{text}»"}],
    )
    assert mood.mood == "good", (mode, mood)
