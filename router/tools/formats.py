"""All formats by name, and the format that a chat template uses."""

from __future__ import annotations

from router.tools.call_format import CallFormat
from router.tools.fenced import FENCED

HERMES = CallFormat(
    name="hermes",
    trigger="<tool_call>",
    opening='\n{"name": "',
    after_name='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)
"""The format of Hermes and Qwen: a JSON object between two tags, once for each call."""

LLAMA_JSON = CallFormat(
    name="llama3_json",
    trigger="",
    opening='{"name": "',
    after_name='", "parameters": ',
    end="}",
    most_calls=1,
)
"""The format of Llama 3: the whole answer is one JSON object, and there is one call at most.

Its template refuses turns with several calls.
"""

FORMATS = {one.name: one for one in (HERMES, LLAMA_JSON, FENCED)}


def format_of(template: str) -> CallFormat | None:
    """Return the format that a chat template describes, or None where it is not a known one."""
    if HERMES.trigger in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return LLAMA_JSON
    return FENCED if FENCED.trigger in template else None
