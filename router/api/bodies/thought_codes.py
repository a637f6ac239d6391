"""What a model thought as a code, which clients of `/v1/responses` send back in its place.

Clients for which nothing is stored ask for `encrypted_content`, and send back nothing else of what
was thought: no model would see it again while it calls tools. The code is no secret and no proof:
it has the same text that the item has.
"""

from __future__ import annotations

import base64
from typing import Any

INCLUDED = "reasoning.encrypted_content"
"""What a client names in `include` that wants codes."""
_PREFIX = "pdserve-thought-"


def code_of(thought: str) -> str:
    """Return the code of what was thought."""
    return _PREFIX + base64.b64encode(thought.encode()).decode()


def thought_of(code: Any) -> str:
    """Return what a code says; empty for one of another server, and for what is no code."""
    if not isinstance(code, str) or not code.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(code.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return ""
