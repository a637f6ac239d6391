"""The answer to a chat that thinks or calls functions, in OpenAI's shape.

The first event of a call has its number, its id and the function's name; the events after it have
the number and more of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from common.request import FinishReason
from router.api.answers.chat_and_completions import ChatFormat, WholeChoice
from router.http.sse import text_json, to_json
from router.text.output.choice_text import Delta
from router.tools.answer_parser import AnswerParser, whole_answer
from router.tools.parts import CallArguments, CallStart, Part, TextPart, ThinkingPart

NO_LOGPROBS = ',"logprobs":null'


class ChatPartsFormat(ChatFormat):
    """`/v1/chat/completions` with `reasoning_content` and `tool_calls`."""

    def events(self, index: int, deltas: Sequence[Delta]) -> bytes:
        """Return the events for these deltas of choice `index`; empty when they show nothing."""
        return "".join(self._events(index, deltas)).encode()

    def _events(self, index: int, deltas: Sequence[Delta]) -> Iterator[str]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self._syntax)
            role = '"delta":{"role":"assistant","content":null}'
            first = f'{role},"logprobs":{self._empty_logprobs()}'
            yield self._event(index, first, "null", self._top_tokens(index))
        for delta in deltas:
            is_last = delta.details.finish_reason is not None
            parts = parser.push(delta.text, is_last=is_last)
            fields = [self._part(index, one) for one in parts if self._is_part_shown(one)]
            tokens = self._tokens(delta)
            if tokens and not fields:
                fields.append("{}")
            for field in fields:
                yield self._event(index, f'"delta":{field}{tokens or NO_LOGPROBS}', "null")
                tokens = ""  # told once, however many parts their text has
            if delta.details.finish_reason is not None:
                reason = self._finish_reason(delta.details.finish_reason, parser)
                last = f'{self._last_fields()},"stop_reason":{to_json(delta.details.stop_reason)}'
                yield self._event(index, last, f'"{reason}"')

    def _tokens(self, delta: Delta) -> str:
        """Return the fields about the tokens of `delta` that were asked for, '' without any."""
        fields = ""
        if self._has_logprobs and delta.entries:
            fields = f',"logprobs":{"".join(self._logprobs(delta.entries))}'
        if self._prompts and delta.token_ids:
            fields = f'{fields or NO_LOGPROBS},"token_ids":{to_json(delta.token_ids)}'
        return fields

    def _is_part_shown(self, part: Part) -> bool:
        return not (self._hides_thinking and isinstance(part, ThinkingPart))

    def _part(self, index: int, part: Part) -> str:
        match part:
            case TextPart():
                return f'{{"content":{text_json(part.behind_text)}}}'
            case ThinkingPart():
                return f'{{"reasoning_content":{text_json(part.behind_text)}}}'
            case CallStart(number, name):
                call = {"index": number, **self._call(index, number, name, "")}
                return to_json({"tool_calls": [call]})
            case CallArguments(number, text):
                function = f'{{"arguments":{text_json(text)}}}'
                return f'{{"tool_calls":[{{"index":{number},"function":{function}}}]}}'

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": call_id(self._head.id, index, number),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _finish_reason(self, reason: FinishReason, parser: AnswerParser) -> str:
        """Return why the choice ended, which `parser` has read to its end."""
        has_calls = parser.ends_in_calls  # a stop token may have cut off a call
        is_call = has_calls and reason is FinishReason.STOP and not self._syntax.is_named
        return "tool_calls" if is_call else reason.value

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        whole = super()._whole_choice(index, choice)
        parser = AnswerParser(self._syntax)
        answer = whole_answer(parser, "".join(choice.text))
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.thinking and not self._hides_thinking:
            message["reasoning_content"] = answer.thinking
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                self._call(index, number, name, arguments)
                for number, (name, arguments) in enumerate(answer.calls)
            ]
        if choice.finish_reason is not None:
            whole["finish_reason"] = self._finish_reason(choice.finish_reason, parser)
        return whole | {"message": message}


def call_id(answer_id: str, index: int, number: int) -> str:
    """Return the id of call `number` of choice `index`, which no other answer has."""
    return f"call_{answer_id.rpartition('-')[2]}{index:x}_{number}"
