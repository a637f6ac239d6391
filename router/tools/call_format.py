"""What a format of calls is: the texts around the names and the arguments of calls.

An answer's calls are `trigger`, `opening`, a call, then `between` and a call for each further one,
and `closing`. A call is the function's name, `after_name`, its arguments, and `end`. The arguments
are one JSON object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TAG = re.compile(r'<[^<>\s="]+>|\[/?[A-Z_]+\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    `trigger` begins calls wherever it stands; '' means at the beginning of the answer alone.
    `opening` stands between it and the name of the function. Without `following` each call has a
    trigger of its own, behind `separator`; else it is what stands between a call and the name of
    the next one. `most_calls` bounds the calls of one answer.
    """

    name: str
    trigger: str
    opening: str
    after_name: str
    end: str
    following: str = ""
    closing: str = ""
    separator: str = ""
    most_calls: int = 16

    @property
    def between(self) -> str:
        """The text between the end of a call and the name of the next one."""
        return self.following or self.separator + self.trigger + self.opening

    @property
    def tags(self) -> frozenset[str]:
        """The texts of the format that may be tokens of their own in a tokenizer."""
        texts = (self.trigger, self.opening, self.after_name, self.end, self.between, self.closing)
        return frozenset(tag for text in texts for tag in _TAG.findall(text))

    @property
    def first_texts(self) -> tuple[str, ...]:
        """The texts of which one begins the arguments."""
        return ("{",)

    def call_text(self, name: str, arguments_json: str) -> str:
        """Return the text of a whole call, which is the only one."""
        return self.calls_text([(name, arguments_json)])

    def calls_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls, each by its name and the JSON of its arguments."""
        texts = [
            f"{name}{self.after_name}{arguments_json}{self.end}" for name, arguments_json in calls
        ]
        return self.trigger + self.opening + self.between.join(texts) + self.closing
