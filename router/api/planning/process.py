"""The router's side of its planning process, which plans large bodies, one at a time.

Parsing a large body holds the interpreter's lock, on any thread: ten megabytes of numbers would
stop every stream of the router for a third of a second. So these bodies are planned by a process
of their own. It is started for the first one and kept, and no library's fork handler runs at its
start: those of gRPC end a child at its birth. When it ends (killed, or out of memory), the body
that it had is planned again by a new one, once.

The process takes one body after the other. A request that ends meanwhile leaves the queue; where
the process has its body already, the plan is dropped when it comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from common.child_process import module_command, start_helper
from common.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded
from common.files.kept_files import KeptFiles
from router.api.bodies.asked import RequestKind
from router.api.planning.messages import (
    LENGTHS,
    Message,
    pack_message,
    pack_request,
    unpack_error,
    unpack_plan,
    unpack_prompt,
)
from router.api.planning.planner import RequestPlan
from router.core.generation import SHUTTING_DOWN
from router.text.chat.conversation import ChatSettings
from router.text.text_model import DEFAULT_CHAT

log = logging.getLogger("pdserve.router.http")

MAX_WAITING_BYTES = 128 << 20
"""Most bytes of all bodies in the queue: a thousand of the least large ones, a dozen of 10 MiB."""
MAX_PLAN_S = 60.0
"""Longest time for one body: twice what ten megabytes take where the context holds all of them."""
_MAX_STARTS = 2
_READ_AHEAD_BYTES = 1 << 20
_PART_BYTES = 256 << 10
_ENDED = (OSError, EOFError)


class LargeBodies(Protocol):
    """Plans bodies without holding up the event loop."""

    async def plan(self, kind: RequestKind, body: bytes, max_model_len: int) -> RequestPlan:
        """Return the plan of `body` for at most `max_model_len` tokens in all.

        Raises what `Planner` raises, and `Overloaded`, `DeadlineExceeded` or `InternalError` where
        there is no plan for a reason other than the body.
        """


class _Process(NamedTuple):
    """A process that runs, and the two ways of its socket."""

    started: subprocess.Popen[bytes]
    replies: asyncio.StreamReader
    requests: asyncio.StreamWriter


@dataclass(eq=False, slots=True)
class _Job:
    kind: RequestKind
    body: bytes
    max_model_len: int
    plan: asyncio.Future[RequestPlan]


def planning_command(
    folder: str,
    model_name: str,
    max_model_len: int,
    chat: ChatSettings = DEFAULT_CHAT,
    files: KeptFiles | None = None,
) -> list[str]:
    """Return the command of the planning process of a model, as `TextModel.load` takes it.

    It reads nothing but `files`, which it has to inherit; without them it reads the folder.
    """
    module = "router.api.planning.child"
    settings = json.dumps({"chat": asdict(chat), "files": files and files.kept})
    return module_command(module, folder, model_name, str(max_model_len), settings)


class PlanningProcess:
    """A `LargeBodies`. Its owner closes it."""

    def __init__(self, command: Sequence[str], files: KeptFiles | None = None) -> None:
        """Plan with the process that `command` starts, which inherits `files`; nothing is started
        yet."""
        self._command = command
        self._files = KeptFiles() if files is None else files
        self._jobs: OrderedDict[_Job, None] = OrderedDict()
        self._waiting_bytes = 0
        self._worker: asyncio.Task[None] | None = None
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child that runs now."""
        return self._process.started.pid if self._process else None

    async def plan(self, kind: RequestKind, body: bytes, max_model_len: int) -> RequestPlan:
        """Queue the body and return its plan; see `LargeBodies`.

        Raises `Overloaded` where too much waits already, and while it closes.
        """
        if self._is_closed:
            raise Overloaded(SHUTTING_DOWN)
        if self._jobs and self._waiting_bytes + len(body) > MAX_WAITING_BYTES:
            raise Overloaded(
                f"{len(self._jobs)} large bodies wait to be read: send the request again"
            )
        job = _Job(kind, body, max_model_len, asyncio.get_running_loop().create_future())
        self._jobs[job] = None
        self._waiting_bytes += len(body)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="planning")
        try:
            return await job.plan
        finally:
            self._forget(job)

    async def close(self) -> None:
        """End the process and every request that waits for it. Idempotent."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for job in self._jobs:
            if not job.plan.done():
                job.plan.set_exception(Overloaded(SHUTTING_DOWN))
        await self._end_process()

    def _forget(self, job: _Job) -> None:
        """Take the job out of the queue, unless it has left it."""
        if job in self._jobs:
            del self._jobs[job]
            self._waiting_bytes -= len(job.body)

    async def _work(self) -> None:
        """Plan what is queued, oldest first."""
        try:
            while self._jobs:
                job = next(iter(self._jobs))
                self._forget(job)
                await self._finish(job)
        finally:
            self._worker = None

    async def _finish(self, job: _Job) -> None:
        try:
            plan = await self._planned(job)
        except asyncio.CancelledError:
            if not job.plan.done():
                job.plan.set_exception(Overloaded(SHUTTING_DOWN))
            raise
        except Exception as error:
            if not job.plan.done():
                job.plan.set_exception(error)
        else:
            if not job.plan.done():
                job.plan.set_result(plan)

    async def _planned(self, job: _Job) -> RequestPlan:
        codes: list[int | None] = []
        for _ in range(_MAX_STARTS):
            process = await self._running_process()
            try:
                async with asyncio.timeout(MAX_PLAN_S):
                    answer = await _ask(process, job)
            except TimeoutError:
                await self._end_process()
                raise DeadlineExceeded(
                    f"the body was not read and tokenized within {MAX_PLAN_S:g} s"
                ) from None
            except _ENDED as ended:
                codes.append(await self._end_process())
                log.warning("the planning process ended with %s: %r", codes[-1], ended)
            except Exception:
                # Parts of this reply may be unread, and would be taken for the next one.
                await self._end_process()
                raise
            else:
                if isinstance(answer, Exception):
                    raise answer
                return answer
            if job.plan.done():
                break
        # A crash is the body's; one that ends by itself has no model to read it for.
        is_crash = all(code is not None and code < 0 for code in codes)
        raise (InvalidRequest if is_crash else InternalError)(
            f"the process that reads large bodies ended {_MAX_STARTS} times on this one"
        )

    async def _running_process(self) -> _Process:
        process = self._process
        if process is not None and process.started.poll() is None:
            return process
        await self._end_process()
        try:
            started, ours = start_helper(self._command, self._files.kept.values())
        except OSError as error:
            log.warning("the planning process does not start: %s", error)
            raise Overloaded("no room to read a large body now: send it again") from error
        replies, requests = await asyncio.open_connection(sock=ours, limit=_READ_AHEAD_BYTES)
        self._process = _Process(started, replies, requests)
        return self._process

    async def _end_process(self) -> int | None:
        """Kill the process, if there is one, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.started.kill()
        process.requests.close()
        return await asyncio.to_thread(process.started.wait)


async def _ask(process: _Process, job: _Job) -> RequestPlan | Exception:
    """Return the plan of a job, or the error that the process has found in its body.

    Raises one of `_ENDED` when the process ends.
    """
    _, replies, requests = process
    for data in pack_message(pack_request(job.kind, job.max_model_len, job.body)):
        view = memoryview(data)
        for start in range(0, len(view), _PART_BYTES):
            if requests.is_closing():  # where uvloop raises `RuntimeError`
                raise ConnectionResetError("the process has closed its input")
            requests.write(view[start : start + _PART_BYTES])
            await requests.drain()
    head = (await _read_message(replies)).head
    if "error" in head:
        return unpack_error(head["error"])
    prompts = []
    for _ in range(head["num_prompts"]):
        prompts.append(unpack_prompt(await _read_message(replies)))
        await asyncio.sleep(0)  # a long prompt takes a millisecond: others have their turn
    return unpack_plan(head, prompts)


async def _read_message(source: asyncio.StreamReader) -> Message:
    head_bytes, rest_bytes = LENGTHS.unpack(await source.readexactly(LENGTHS.size))
    head = json.loads(await source.readexactly(head_bytes))
    return Message(head, await source.readexactly(rest_bytes))
