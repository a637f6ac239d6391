"""A generator that plays scripts in the place of the dispatcher, for tests of the edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason, RequestCounts, SamplingParams, TokenLogprobs
from router.core.generation import PromptResult, RequestListener, Sink, TokenChunk
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.edge_model import tiny_model

TURNS_TO_THE_CLIENT = 20
"""More turns of the event loop than a token needs from the generator to the client."""


def _nothing() -> None:
    """Say nothing: nobody listens any more."""


@dataclass
class Call:
    """One `generate` call: what it was given, how far it came, and whether it is over."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    priority: int = 0
    cache_salt: str = ""
    needs_salt: bool = True
    session: bytes = b""
    is_cut_to_fit: bool = False
    num_pushed: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    accept: Callable[[], None] = _nothing
    """Say that a node computes the prompt."""

    def end(self) -> None:
        """Hold nothing of the answer any more."""
        self.accept = _nothing
        self.closed.set()


Script = Callable[[Call], AsyncIterator[TokenChunk]]


class ScriptedGenerator:
    """Plays a script per call, and remembers every call."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []

    def generate(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        sink: Sink,
        *,
        deadline_s: float,
        priority: int = 0,
        cache_salt: str = "",
        needs_salt: bool = True,
        session: bytes = b"",
        is_cut_to_fit: bool = False,
        listener: RequestListener | None = None,
    ) -> Callable[[], None]:
        call = Call(
            prompt_token_ids,
            sampling,
            deadline_s,
            priority,
            cache_salt,
            needs_salt,
            session,
            is_cut_to_fit,
        )
        call.accept = sink.on_accepted
        self.calls.append(call)
        playing = asyncio.create_task(self._play(call, sink))

        def abort() -> None:
            call.end()
            playing.cancel()

        return abort

    async def _play(self, call: Call, sink: Sink) -> None:
        try:
            async for chunk in self.script(call):
                if call.closed.is_set():
                    return
                call.num_pushed += 1
                sink.on_chunks([chunk])
                sink.send_now()
        except Exception as error:
            sink.on_failed(error)
        finally:
            call.end()


def chunks(
    token_ids: Sequence[int],
    finish: FinishReason = FinishReason.LENGTH,
    *,
    num_cached: int = 0,
    num_logprobs: int | None = None,
    size: int = 1,
) -> list[TokenChunk]:
    """`token_ids` cut into chunks of `size`; with logprobs, token t has -0.5 and t+1.. -1.5, ..."""
    made = []
    for first in range(0, len(token_ids), size):
        ids = tuple(token_ids[first : first + size])
        logprobs: tuple[TokenLogprobs, ...] = ()
        if num_logprobs is not None:
            logprobs = tuple(
                TokenLogprobs(-0.5, tuple((t + k, -0.5 - k) for k in range(num_logprobs)))
                for t in ids
            )
        is_last = first + size >= len(token_ids)
        made.append(
            TokenChunk(
                first_index=first,
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=finish if is_last else None,
                counts=RequestCounts(num_cached) if num_cached and not first else None,
            )
        )
    return made


def says(
    text: str,
    finish: FinishReason = FinishReason.STOP,
    *,
    num_cached: int = 0,
    size: int = 1,
) -> Script:
    """A script that answers `text`, ended by EOS when it stops."""
    model = tiny_model()
    ids = list(model.encode(text, add_special_tokens=False, param="text"))
    if finish is FinishReason.STOP:
        ids += sorted(model.eos_token_ids)

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        of_prompt = PromptResult(prompt_logprobs=prompt_logprobs(call))
        for chunk in chunks(
            ids, finish, num_cached=num_cached, num_logprobs=call.sampling.logprobs, size=size
        ):
            yield chunk if chunk.first_index else chunk._replace(of_prompt=of_prompt)

    return play


def prompt_logprobs(call: Call) -> PromptLogprobs | None:
    """What a node finds of the prompt: token t, at place i, has -i / 8, and t, t+1, .. are best."""
    num_top, found = call.sampling.prompt_logprobs, call.prompt_token_ids[1:]
    if num_top is None or not found:
        return None
    return PromptLogprobs(
        num_top,
        tuple(-place / 8 for place in range(1, len(found) + 1)),
        tuple(1 for _ in found),
        tuple(token_id + k for token_id in found for k in range(num_top)),
        tuple(-place / 8 - k for place in range(1, len(found) + 1) for k in range(num_top)),
    )


def plays(played: Sequence[TokenChunk]) -> Script:
    """A script of these chunks."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in played:
            yield chunk

    return play


def fails(error: Exception, after: Sequence[TokenChunk] = ()) -> Script:
    """A script that raises `error` after some chunks."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in after:
            yield chunk
        raise error

    return play


def never_ends(text: str = "x") -> Script:
    """A script that gives `text` again and again, as often as `max_tokens` allows, and no end."""
    ids = tiny_model().encode(text, add_special_tokens=False, param="text")

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for first in range(0, call.sampling.max_tokens, len(ids)):
            yield TokenChunk(first_index=first, token_ids=ids)
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    return play


def hangs_after(first: Sequence[TokenChunk] = ()) -> Script:
    """A script that gives some chunks and then nothing more."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in first:
            yield chunk
        await asyncio.Event().wait()

    return play


def runs_out_of_time(time: StoppedTime, first: Sequence[TokenChunk] = ()) -> Script:
    """A script that gives some chunks; when the client has them, the request's time is over."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in first:
            yield chunk
        for _ in range(TURNS_TO_THE_CLIENT):
            await asyncio.sleep(0)
        time.advance(call.deadline_s)
        await asyncio.Event().wait()

    return play
