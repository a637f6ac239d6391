"""The format of Hermes and Qwen: a JSON object between two tags, once for each call."""

from __future__ import annotations

from router.tools.call_format import CallFormat

HERMES = CallFormat(
    name="hermes",
    trigger="<tool_call>",
    lead="\n",
    key="arguments",
    end="\n</tool_call>",
    separator="\n",
)
