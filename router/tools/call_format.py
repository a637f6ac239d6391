"""What a format of calls is: the texts around the names and the arguments of calls.

An answer's calls are `trigger`, `opening`, a call, then `between` and a call for each further one,
and `closing`. A call is the function's name, `after_name`, its arguments, and `end`. The arguments
are one JSON object, or stand between tags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.tools.definitions import Tool
from router.tools.json_extent import JsonArguments
from router.tools.tagged.kinds import ArgumentKinds, argument_kinds
from router.tools.tagged.reader import TaggedArguments
from router.tools.tagged.tags import Tags

_TAG = re.compile(r'<[^<>\s="]+>|\[/?[A-Z_]+\]')


class ArgumentsReader(Protocol):
    """Turns the arguments of one call to the JSON of an object."""

    @property
    def is_over(self) -> bool:
        """Whether the arguments are whole."""

    def take(self, text: str) -> tuple[str, int]:
        """Return the JSON that is certain now, and how many characters of `text` it took.

        What it did not take comes again, with more behind it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    `trigger` begins calls wherever it stands; '' means at the beginning of the answer alone.
    `opening` stands between it and the name of the function. Without `following` each call has a
    trigger of its own, behind `separator`; else it is what stands between a call and the name of
    the next one. `tagged` are the tags of arguments that are no JSON object. `before_id`, and
    an id of 9 letters and digits, may stand behind a name. With `may_be_spaced` a space may stand
    behind the trigger: some tokenizers write one before a text. `most_calls` bounds the calls of
    one answer.
    """

    name: str
    trigger: str
    opening: str
    after_name: str
    end: str
    following: str = ""
    closing: str = ""
    separator: str = ""
    tagged: Tags | None = None
    before_id: str = ""
    may_be_spaced: bool = False
    most_calls: int = 16

    @property
    def between(self) -> str:
        """The text between the end of a call and the name of the next one."""
        return self.following or self.separator + self.trigger + self.opening

    @property
    def tags(self) -> frozenset[str]:
        """The texts of the format that may be tokens of their own in a tokenizer."""
        texts = [self.trigger, self.opening, self.after_name, self.end, self.between, self.closing]
        texts.append(self.before_id)
        if self.tagged:
            texts += [self.tagged.before_key, self.tagged.after_key, self.tagged.end]
        return frozenset(tag for text in texts for tag in _TAG.findall(text))

    @property
    def first_texts(self) -> tuple[str, ...]:
        """The texts, without white space, of which one begins the arguments, or ends the call."""
        if self.tagged is None:
            return ("{",)
        return tuple(text.split()[0] for text in (self.tagged.before_key, self.end))

    def kinds(self, tools: Sequence[Tool]) -> dict[str, ArgumentKinds]:
        """Return the kinds of the arguments of tools, by name, where `reader` wants them."""
        if self.tagged is None:
            return {}
        return {tool.name: argument_kinds(tool.parameters or {}) for tool in tools}

    def reader(self, kinds: ArgumentKinds) -> ArgumentsReader:
        """Return what reads the arguments of one call, whose values are of `kinds`."""
        return TaggedArguments(self.tagged, kinds) if self.tagged else JsonArguments()

    def call_text(self, name: str, arguments_json: str) -> str:
        """Return the text of a whole call, which is the only one."""
        return self.calls_text([(name, arguments_json)])

    def calls_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls, each by its name and the JSON of its arguments."""
        texts = [
            f"{name}{self.after_name}{self._arguments_text(arguments)}{self.end}"
            for name, arguments in calls
        ]
        return self.trigger + self.opening + self.between.join(texts) + self.closing

    def _arguments_text(self, arguments_json: str) -> str:
        return self.tagged.text_of(arguments_json) if self.tagged else arguments_json
