"""What a format of calls is: the text around the JSON object of a call.

A call is `begin`, then `{"name": …, "arguments": {…}}`, then `end`. Without a `begin` a call is the
whole answer, from its first character.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    `trigger` begins a call wherever it stands; '' means at the beginning of the answer alone.
    `lead` follows it. `separator` stands between two calls. `key` is the name of the arguments.
    `most_calls` bounds the calls of one answer.
    """

    name: str
    trigger: str
    lead: str
    key: str
    end: str
    separator: str = ""
    most_calls: int = 16

    def before_arguments(self, name: str) -> str:
        """Return the text of a call of the function `name`, from after the trigger."""
        return f'{self.lead}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def after_arguments(self) -> str:
        """The text of a call after its arguments."""
        return "}" + self.end

    def call_text(self, name: str, arguments_json: str) -> str:
        """Return the text of a whole call."""
        before = self.trigger + self.before_arguments(name)
        return before + arguments_json + self.after_arguments
