"""All formats by name, and the format that a chat template uses."""

from __future__ import annotations

import re
from dataclasses import replace

from router.tools.call_format import CallFormat
from router.tools.fenced import FENCED
from router.tools.tagged.tags import Tags

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

QWEN_CODER = CallFormat(
    name="qwen3_coder",
    trigger="<tool_call>",
    opening="\n<function=",
    after_name=">\n",
    tagged=Tags(before_key="<parameter=", after_key=">\n", end="\n</parameter>", after_end="\n"),
    end="</function>\n</tool_call>",
    separator="\n",
)
"""The format of Qwen3-Coder and Qwen3.5: each argument between tags."""

SEED = replace(
    QWEN_CODER,
    name="seed_oss",
    trigger="<seed:tool_call>",
    tagged=Tags(before_key="<parameter=", after_key=">", end="</parameter>", after_end="\n"),
    end="</function>\n</seed:tool_call>",
)
"""The format of Seed-OSS: as of Qwen3-Coder, with other tags and without lines around values."""

_GLM_TAGS = Tags(
    before_key="<arg_key>",
    after_key="</arg_key>\n<arg_value>",
    end="</arg_value>",
    after_end="\n",
)
GLM = CallFormat(
    name="glm45",
    trigger="<tool_call>",
    opening="",
    after_name="\n",
    tagged=_GLM_TAGS,
    end="</tool_call>",
    separator="\n",
)
"""The format of GLM-4.5 and GLM-4.6: the name and the value of each argument between tags."""

GLM_WITHOUT_LINES = replace(
    GLM,
    name="glm47",
    after_name="",
    tagged=replace(_GLM_TAGS, after_key="</arg_key><arg_value>", after_end=""),
    separator="",
)
"""The format of GLM-4.7: as of GLM-4.5, on one line."""

MINIMAX = CallFormat(
    name="minimax_m2",
    trigger="<minimax:tool_call>",
    opening='\n<invoke name="',
    after_name='">\n',
    tagged=Tags(before_key='<parameter name="', after_key='">', end="</parameter>", after_end="\n"),
    end="</invoke>",
    following='\n<invoke name="',
    closing="\n</minimax:tool_call>",
)
"""The format of MiniMax-M2: all calls between two tags, each argument between tags."""

MISTRAL = CallFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    opening='[{"name": "',
    after_name='", "arguments": ',
    end="}",
    following=', {"name": "',
    closing="]",
    may_be_spaced=True,
)
"""The format of Mistral up to version 7 of its tokenizer: a list of JSON objects."""

MISTRAL_ARGS = CallFormat(
    name="mistral_args",
    trigger="[TOOL_CALLS]",
    opening="",
    after_name="[ARGS]",
    before_id="[CALL_ID]",
    end="",
)
"""The format of Mistral from version 11 of its tokenizer on: tags that are control tokens."""

DEEPSEEK_FENCED = CallFormat(
    name="deepseek_v3",
    trigger="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    following="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    closing="<｜tool▁calls▁end｜>",
)
"""The format of DeepSeek V3 and R1: JSON objects in fenced blocks between tags."""

DEEPSEEK = CallFormat(
    name="deepseek_v31",
    trigger="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    following="<｜tool▁call▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
)
"""The format of DeepSeek V3.1: JSON objects between tags."""

GRANITE = CallFormat(
    name="granite",
    trigger="<|tool_call|>",
    opening='[{"name": "',
    after_name='", "arguments": ',
    end="}",
    following=', {"name": "',
    closing="]",
)
"""The format of Granite 3: a list of JSON objects behind a tag."""

FORMATS = {
    one.name: one
    for one in [
        HERMES,
        LLAMA_JSON,
        QWEN_CODER,
        SEED,
        GLM,
        GLM_WITHOUT_LINES,
        MISTRAL,
        MISTRAL_ARGS,
        DEEPSEEK_FENCED,
        DEEPSEEK,
        MINIMAX,
        GRANITE,
        FENCED,
    ]
}

_BY_TEXTS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    ((SEED.trigger, "<parameter="), SEED),
    ((QWEN_CODER.trigger, "<function=", "<parameter="), QWEN_CODER),
    (("<arg_key>", "</arg_key><arg_value>"), GLM_WITHOUT_LINES),
    (("<arg_key>",), GLM),
    ((MINIMAX.trigger,), MINIMAX),
    ((MISTRAL.trigger, "[ARGS]"), MISTRAL_ARGS),
    ((MISTRAL.trigger,), MISTRAL),
    ((DEEPSEEK.trigger, "```json"), DEEPSEEK_FENCED),
    ((DEEPSEEK.trigger,), DEEPSEEK),
    ((GRANITE.trigger,), GRANITE),
    ((HERMES.trigger,), HERMES),
    (("<|python_tag|>",), LLAMA_JSON),
)
"""Formats by the texts that their templates have, all of them; the first one counts."""
_LLAMA_CALL = re.compile(r'\{\s*"name": [^:]+"parameters": ')
"""A call in a template, or an example of one. A function, which has `parameters` too, has a
description between, and another format has other names for the name."""


def format_of(template: str) -> CallFormat | None:
    """Return the format that a chat template describes, or None where it is not a known one."""
    for texts, form in _BY_TEXTS:
        if all(text in template for text in texts):
            return form
    if _LLAMA_CALL.search(template):
        return LLAMA_JSON
    return FENCED if FENCED.trigger in template else None
