"""A format that any instruct model can follow: a JSON object in a fenced block.

The text that explains it goes into the system message (`router.tools.plain_messages`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.tools.call_format import CallFormat

FENCED = CallFormat(
    name="fenced",
    trigger="```tool_call",
    opening='\n{"name": "',
    after_name='", "arguments": ',
    end="}\n```",
    separator="\n",
)

_EXPLANATION = """\
You can call functions. Their signatures, one JSON object in a line:

{functions}

To call a function, answer with its name and its arguments in a block of this form:

{example}

The results come in the next message. Where no function helps, answer in plain text."""


def explanation(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that tells a model about the functions of `tools`, as OpenAI has them."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = FENCED.call_text("function_name", '{"argument": "value"}')
    return _EXPLANATION.format(functions="\n".join(lines), example=example)
