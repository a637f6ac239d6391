"""A streamed answer on its way to its client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from router.core.generation import TakeChunks, TokenChunk
from router.http.exchange import Reply
from router.http.sse import DONE
from router.openai.choice_streams import Group
from router.openai.formats import AnswerFormat
from router.text.choice_text import ChoiceText, Delta
from router.text.usage import Usage


@dataclass(frozen=True, slots=True)
class AnswerStream:
    """One answer's format, its client, how many choices it has, and the count of what was sent."""

    form: AnswerFormat
    usage: Usage
    reply: Reply
    num_choices: int

    async def send_all(self, groups: AsyncGenerator[Group, None]) -> None:
        """Every group as it comes, the last with the end. The status is sent with the first."""
        reply, num_left, last = self.reply, self.num_choices, b""
        async for index, deltas in groups:
            self.usage.count(index, deltas)
            if not reply.is_started:
                await reply.start_stream()
            part = self.form.events(index, deltas)
            num_left -= deltas[-1].finish_reason is not None
            if num_left:
                await reply.send_part(part)
            else:
                last = part
        await reply.end_stream(last + self.form.usage_event(self.usage) + DONE)

    def taker(self, text: ChoiceText, on_deltas: Callable[[Sequence[Delta]], object]) -> TakeChunks:
        """The short way of the answer's only choice, which no stop string ends: what comes while
        `send_all` waits for it is written at once, unless it is the first, the last, or the client
        does not keep up. It comes to the same as the long way, without its waking."""
        form, usage, reply = self.form, self.usage, self.reply

        def take(chunks: Sequence[TokenChunk]) -> bool:
            if chunks[-1].finish_reason is not None or not reply.can_write_part():
                return False
            deltas = text.push_all(chunks)
            on_deltas(deltas)
            usage.count(0, deltas)
            reply.write_part(form.events(0, deltas))
            return True

        return take
