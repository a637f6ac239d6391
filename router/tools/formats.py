"""All formats by name, and the format that a chat template uses."""

from __future__ import annotations

from router.tools.call_format import CallFormat
from router.tools.fenced import FENCED
from router.tools.hermes import HERMES
from router.tools.llama_json import LLAMA_JSON

FORMATS = {one.name: one for one in (HERMES, LLAMA_JSON, FENCED)}


def format_of(template: str) -> CallFormat | None:
    """Return the format that a chat template describes, or None where it is not a known one."""
    if HERMES.trigger in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return LLAMA_JSON
    return FENCED if FENCED.trigger in template else None
