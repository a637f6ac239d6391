"""How long a body stops the router's event loop: `python -m bench.router.planning --json`.

Bodies of each kind, as large as the JSON limits and `--max-body` allow, are planned beside an event
loop that does nothing but look at the time every millisecond. A stall is the longest time between
two looks, the millisecond included, in milliseconds: the worst of --rounds.

    idle_ms        without any body: what the machine itself does
    start_ms       start of the planning process: `stall`, and `until_planned`, the time until the
                   first large body was planned
    process_mib    memory of the planning process: before and `after` the bodies, and its `peak`
    kinds          per kind of body, with `large_mib`, the size of the large one:
      inline       a body of INLINE_BODY_BYTES, planned on the event loop
      thread       a body of MAX_THREAD_BODY_BYTES, planned on the thread
      crowd        8 of these at once
      large_thread, large_process     the large body, on the thread and by the planning process
      plan_ms      until its plan is there, by the process
      outcome      `planned`, or the code of the error
    worst          the longest stall of each column
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench.command import flags_of, print_figures
from common.settings.config import ApiConfig
from pdserve.checkpoints.demo_model import demo_model_folder
from router.api.bodies.asked import RequestKind
from router.api.bodies.json_text import MAX_JSON_COMMAS, MAX_JSON_CONTAINERS, MAX_JSON_MEMBERS
from router.api.planning.body_planner import INLINE_BODY_BYTES, MAX_THREAD_BODY_BYTES
from router.api.planning.choices import MAX_CHOICES
from router.api.planning.planner import Planner
from router.api.planning.process import PlanningProcess, planning_command
from router.http.errors import api_error
from router.text.text_model import TextModel

LOOK_S = 0.001
IDLE_S = 1.0
CROWD = 8
COLUMNS = ("inline", "thread", "crowd", "large_thread", "large_process")

Body = tuple[RequestKind, bytes]
MakeBody = Callable[[int], Body]


def bodies() -> dict[str, MakeBody]:
    """Return what makes a body of each kind, of at most so many bytes."""
    ids = b"49151," * 8000 + b"7"
    return {
        "token ids": partial(_completion, b"[", b"7,", b"7]", MAX_JSON_COMMAS - 9),
        "lists of token ids": partial(
            _completion, b"[", b"[" + ids + b"],", b"[7]]", MAX_CHOICES - 1
        ),
        "floats": partial(_completion, b"[[", b"1.25,", b"7]]", MAX_JSON_COMMAS - 9),
        "texts": partial(_completion, b"[", b'"a",', b'"a"]', 4 * MAX_JSON_CONTAINERS - 9),
        "unknown fields": _unknown_fields,
        "digits": partial(_completion, b'"', b"7", b'"', None),
        "words": partial(_completion, b'"', b"hello ", b'"', None),
        "characters": partial(_completion, b'"', "é漢字😀".encode(), b'"', None),
        "escaped characters": partial(_completion, b'"', b"\\u6f22", b'"', None),
        "backslashes": partial(_completion, b'"', b"\\\\", b'"', None),
        "spaces around": partial(_completion, b'"a"', b" ", b"", None),
        "special tokens": partial(_message, b"<|im_end|>"),
        "characters of marks": partial(_message, "\ue000".encode()),
        "messages": partial(_chat, b'{"role":"user","content":"a"},', MAX_JSON_CONTAINERS - 3),
        "messages of the assistant": partial(
            _chat, b'{"role":"assistant"},', MAX_JSON_CONTAINERS - 3
        ),
        "long messages": partial(
            _chat, b'{"role":"user","content":"' + b"hello " * 800 + b'"},', MAX_JSON_CONTAINERS
        ),
    }


def _filled(head: bytes, piece: bytes, tail: bytes, most: int | None, num_bytes: int) -> bytes:
    """Return the body with as many pieces as fit, at most `most`."""
    count = (num_bytes - len(head) - len(tail)) // len(piece)
    return head + piece * (count if most is None else min(count, most)) + tail


def _completion(opening: bytes, piece: bytes, closing: bytes, most: int | None, num: int) -> Body:
    head = b'{"model":"m","max_tokens":1,"prompt":' + opening
    return RequestKind.COMPLETION, _filled(head, piece, closing + b"}", most, num)


def _chat(message: bytes, most: int, num_bytes: int) -> Body:
    tail = b'{"role":"user","content":"a"}]}'
    return RequestKind.CHAT, _filled(b'{"model":"m","messages":[', message, tail, most, num_bytes)


def _message(piece: bytes, num_bytes: int) -> Body:
    head = b'{"model":"m","messages":[{"role":"user","content":"'
    return RequestKind.CHAT, _filled(head, piece, b'"}]}', None, num_bytes)


def _unknown_fields(num_bytes: int) -> Body:
    """Return a body of fields that the server does not know."""
    head = b'{"model":"m","prompt":"a"'
    num_fields = min((num_bytes - len(head) - 1) // 10, MAX_JSON_MEMBERS - 2)
    fields = b"".join(b',"%05x":1' % number for number in range(num_fields))
    return RequestKind.COMPLETION, head + fields + b"}"


async def longest_stall_ms(work: Awaitable[Any]) -> tuple[float, float]:
    """Return the longest time between two looks while `work` runs, and how long it ran."""
    job = asyncio.ensure_future(work)
    began_s = last_s = time.perf_counter()
    longest_s = 0.0
    while not job.done():
        await asyncio.sleep(LOOK_S)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    await job
    return longest_s * 1000, (last_s - began_s) * 1000


class Measurement:
    """One model, a thread and a planning process."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self._model = TextModel.load(folder, "m", 0)
        self._thread = ThreadPoolExecutor(1)
        self._process = PlanningProcess(planning_command(str(folder), "m", 0))
        self._rounds = rounds

    async def run(self) -> dict[str, Any]:
        """Measure everything."""
        largest = ApiConfig().max_body
        idle_ms, _ = await longest_stall_ms(asyncio.sleep(IDLE_S))
        first = bodies()["spaces around"](MAX_THREAD_BODY_BYTES + 1)
        stall_ms, until_planned_ms = await longest_stall_ms(self._by_process(first))
        before_mib = self._memory_mib("VmRSS")
        kinds = {name: await self._kind(make, largest) for name, make in bodies().items()}
        result = {
            "idle_ms": round(idle_ms, 1),
            "start_ms": {"stall": round(stall_ms, 1), "until_planned": round(until_planned_ms)},
            "process_mib": {
                "before": before_mib,
                "after": self._memory_mib("VmRSS"),
                "peak": self._memory_mib("VmHWM"),
            },
            "kinds": kinds,
            "worst": {name: max(kind[name] for kind in kinds.values()) for name in COLUMNS},
        }
        await self._process.close()
        return result

    async def _kind(self, make: MakeBody, largest: int) -> dict[str, Any]:
        small, medium, large = map(make, (INLINE_BODY_BYTES, MAX_THREAD_BODY_BYTES, largest))
        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "inline": lambda: self._on_loop(small),
            "thread": lambda: self._on_thread(medium),
            "crowd": lambda: asyncio.gather(*(self._on_thread(medium) for _ in range(CROWD))),
            "large_thread": lambda: self._on_thread(large),
            "large_process": lambda: self._by_process(large),
        }
        stalls_ms: dict[str, list[float]] = {name: [] for name in ways}
        plan_ms = []
        for _ in range(self._rounds):
            for name, way in ways.items():
                stall_ms, took_ms = await longest_stall_ms(way())
                stalls_ms[name].append(stall_ms)
            plan_ms.append(took_ms)
        return {
            "large_mib": round(len(large[1]) / (1 << 20), 1),
            **{name: round(max(stalls), 1) for name, stalls in stalls_ms.items()},
            "plan_ms": round(min(plan_ms)),
            "outcome": await self._by_process(large),
        }

    async def _on_loop(self, body: Body) -> str:
        return self._planned(body)

    async def _on_thread(self, body: Body) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._planned, body)

    async def _by_process(self, body: Body) -> str:
        try:
            await self._process.plan(*body, self._model.max_model_len)
        except Exception as error:
            return api_error(error).code
        return "planned"

    def _planned(self, body: Body) -> str:
        planner = Planner(
            self._model, self._model.max_model_len, draw_seed=lambda: secrets.randbits(64)
        )
        try:
            planner.plan(*body)
        except Exception as error:
            return api_error(error).code
        return "planned"

    def _memory_mib(self, field: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"{field}:")]
        return int(line.split()[1]) >> 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.router.planning", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="readings of each kind and way")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("wanted at least one round")
    figures = uvloop.run(Measurement(demo_model_folder(), options.rounds).run())
    print_figures(figures, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
