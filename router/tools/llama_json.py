"""The format of Llama 3: the whole answer is one JSON object, and there is one call at most.

Its template refuses turns with several calls.
"""

from __future__ import annotations

from router.tools.call_format import CallFormat

LLAMA_JSON = CallFormat(
    name="llama3_json", trigger="", lead="", key="parameters", end="", most_calls=1
)
