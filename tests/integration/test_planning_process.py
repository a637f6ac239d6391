"""The process that plans large bodies: the same plans, and what happens when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from common.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded
from common.files.kept_files import KeptFiles
from router.api.bodies.asked import RequestKind
from router.api.planning import process
from router.api.planning.messages import pack_message, pack_request
from router.api.planning.planner import Planner, RequestPlan
from router.api.planning.process import PlanningProcess, planning_command
from router.http.errors import api_error
from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.processes import is_alive
from tests.support.http.edge_model import CONTEXT, tiny_model, write_model_folder

CHAT, COMPLETION = RequestKind.CHAT, RequestKind.COMPLETION
SEED = 77
on_one_loop = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    return planning_command(str(folder), "tiny", 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planning(command: list[str]) -> AsyncIterator[PlanningProcess]:
    """One for all tests that leave it able to plan: a start takes longer than most of them."""
    planning = PlanningProcess(command)
    yield planning
    await planning.close()


@pytest.fixture
async def own_planning(command: list[str]) -> AsyncIterator[PlanningProcess]:
    planning = PlanningProcess(command)
    yield planning
    await planning.close()


def put_another_model(folder: Path) -> None:
    """Two letters are each other's tokens."""
    path = folder / "tokenizer.json"
    layout = json.loads(path.read_bytes())
    vocab = layout["model"]["vocab"]
    vocab["h"], vocab["x"] = vocab["x"], vocab["h"]
    path.write_text(json.dumps(layout))


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", **fields}).encode()


HELLO = body_of(prompt="Hello", seed=SEED)


def in_this_process(kind: RequestKind, body: bytes, model: TextModel) -> RequestPlan | Exception:
    try:
        return Planner(model, CONTEXT, draw_seed=lambda: 0).plan(kind, body)
    except Exception as error:
        return error


async def turns() -> None:
    """Enough turns of the event loop for a body to reach a process that does not read it."""
    for _ in range(50):
        await asyncio.sleep(0)


async def hello_of(planning: PlanningProcess) -> RequestPlan:
    return await planning.plan(COMPLETION, HELLO, CONTEXT)


BODIES: list[tuple[RequestKind, bytes]] = [
    (COMPLETION, body_of(prompt="Hello", seed=1)),
    (COMPLETION, body_of(prompt=["Hello", "漢字 é"], n=3, seed=2, echo=True, max_tokens=5)),
    (COMPLETION, body_of(prompt=[[5, 6], [7]], seed=-2, echo=True, stop=["\n", "a"], stream=True)),
    (COMPLETION, body_of(prompt=[5, 6, 300], seed=4, logprobs=3, stop_token_ids=[9, 8])),
    (COMPLETION, body_of(prompt=[[9] * (CONTEXT - 1)] * 128, seed=5, max_tokens=1)),
    (COMPLETION, body_of(prompt="x", seed=6, metadata={str(i): [i] for i in range(9999)})),
    (COMPLETION, body_of(prompt="x", seed=7, temperature=0.1, top_p=1 / 3, priority=-7)),
    (COMPLETION, body_of(prompt="Hello " * 100_000)),
    (COMPLETION, body_of(prompt=[7] * CONTEXT)),
    (COMPLETION, body_of(prompt="x", max_tokens=CONTEXT, seed=3)),
    (COMPLETION, body_of(prompt=[[1.5] * 99_999])),
    (COMPLETION, body_of(prompt=[1, "a"])),
    (COMPLETION, body_of(prompt="x", seed=1, nonsense="y" * 99_999)),
    (COMPLETION, body_of(prompt="x", seed=1, **{"y" * 99_999: 1})),
    (COMPLETION, body_of(prompt="x", seed=1, **{str(i): i for i in range(60_000)})),
    (COMPLETION, body_of(prompt="x", model="z" * 99_999)),
    (COMPLETION, body_of(prompt="x", seed=2**64)),
    (COMPLETION, b"[" * 99_999),
    (COMPLETION, b'{"model": "tiny"'),
    (COMPLETION, b"\xff" * 99_999),
    (COMPLETION, b""),
    (COMPLETION, b"7"),
    (CHAT, body_of(messages=[USER], seed=8, stream=True, stream_options={"include_usage": True})),
    (CHAT, body_of(messages=[USER], seed=9, n=4, logprobs=True, top_logprobs=2)),
    (CHAT, body_of(messages=[USER] * 20_000)),
    (CHAT, body_of(messages=[{"role": "user"}] * 20_000)),
    (CHAT, body_of(messages=[USER], tools=[{"a": 1}])),
]


async def planned(
    planning: PlanningProcess, kind: RequestKind, body: bytes
) -> RequestPlan | Exception:
    try:
        return await planning.plan(kind, body, CONTEXT)
    except Exception as error:
        return error


@on_one_loop
async def test_the_plans_are_those_of_this_process(planning: PlanningProcess) -> None:
    """Errors too: type, words and parameter."""
    model = tiny_model()
    kinds = set()
    for kind, body in BODIES:
        wanted = in_this_process(kind, body, model)
        got = await planned(planning, kind, body)
        if isinstance(wanted, Exception):
            assert type(got) is type(wanted), got
            answer = api_error(got).as_json()
            assert answer == api_error(wanted).as_json()
            assert len(answer) < 5000, "an error does not repeat a body"
        else:
            assert got == wanted
        kinds.add(type(wanted).__name__)
    assert kinds == {"RequestPlan", "InvalidRequest", "ContextExceeded", "ModelNotFound"}


@on_one_loop
async def test_the_context_is_that_of_each_request(planning: PlanningProcess) -> None:
    body = body_of(prompt=[7] * 20, max_tokens=1)
    assert (await planning.plan(COMPLETION, body, CONTEXT)).prompt_lengths == (20,)
    with pytest.raises(InvalidRequest, match="context length is 20 tokens"):
        await planning.plan(COMPLETION, body, 20)


@on_one_loop
async def test_every_prompt_without_a_seed_draws_one(planning: PlanningProcess) -> None:
    body = body_of(prompt=["a", "b"], n=2)
    plans = [await planning.plan(COMPLETION, body, CONTEXT) for _ in range(2)]
    seeds = {sampling.seed for plan in plans for _, sampling in plan.choices()}
    assert len(seeds) == 8
    given = [sampling.seed for _, sampling in plans[0].choices()]
    again = await planning.plan(COMPLETION, body_of(prompt="a", n=2, seed=given[0]), CONTEXT)
    assert [sampling.seed for _, sampling in again.choices()] == given[:2]


async def test_nothing_starts_before_the_first_large_body(own_planning: PlanningProcess) -> None:
    before = own_planning.pid
    await hello_of(own_planning)
    pid = own_planning.pid
    assert (before, pid is None) == (None, False)
    assert pid is not None
    await asyncio.gather(*(hello_of(own_planning) for _ in range(5)))
    assert own_planning.pid == pid
    assert os.getsid(pid) == pid != os.getsid(0)


@on_one_loop
async def test_killed_between_bodies_it_is_started_again(planning: PlanningProcess) -> None:
    wanted = await hello_of(planning)
    first = planning.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not is_alive(first), "it has ended")
    assert await hello_of(planning) == wanted
    assert planning.pid not in (None, first)


@on_one_loop
async def test_killed_with_a_body_it_gets_the_body_again(planning: PlanningProcess) -> None:
    wanted = await hello_of(planning)
    first = planning.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    asked = [asyncio.create_task(hello_of(planning)) for _ in range(3)]
    await turns()
    os.kill(first, signal.SIGKILL)
    assert await asyncio.gather(*asked) == [wanted] * 3
    assert not is_alive(first)


@pytest.mark.parametrize("read", ["", "import sys; sys.stdin.buffer.read(99)"])
async def test_a_body_that_ends_it_twice_is_given_up(read: str) -> None:
    """The error does not ask for the request again: it would end the process again."""
    planning = PlanningProcess((sys.executable, "-c", read))
    with pytest.raises(InternalError, match="ended 2 times on this one") as caught:
        await planning.plan(COMPLETION, b"x" * (1 << 20), CONTEXT)
    assert api_error(caught.value).status == 500
    assert planning.pid is None
    await planning.close()


async def test_a_body_that_crashes_it_twice_is_the_clients_error() -> None:
    crash = (
        "import os, signal, sys; sys.stdin.buffer.read(99); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    planning = PlanningProcess((sys.executable, "-c", crash))
    with pytest.raises(InvalidRequest, match="ended 2 times on this one"):
        await planning.plan(COMPLETION, b"x" * (1 << 20), CONTEXT)
    await planning.close()


async def test_a_model_that_is_gone_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    planning = PlanningProcess(planning_command(str(tmp_path / "gone"), "tiny", 0))
    with pytest.raises(InternalError):
        await hello_of(planning)
    await planning.close()
    assert "gone is not a folder" in capfd.readouterr().err


@pytest.mark.covers("M07")
@pytest.mark.parametrize("change", [shutil.rmtree, put_another_model])
async def test_a_folder_that_has_changed_since_the_start_changes_no_plan(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    """A router is there for weeks, and the process may be started at any time, and again."""
    folder, template = write_model_folder(tmp_path / "tiny"), tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    chat, files = ChatSettings(tool_template=str(template)), KeptFiles()
    model = TextModel.load(folder, "tiny", 0, chat, files)
    change(folder)
    template.unlink()
    planning = PlanningProcess(planning_command(str(folder), "tiny", 0, chat, files), files)
    try:
        plan = await planning.plan(COMPLETION, body_of(prompt="hello", seed=1), CONTEXT)
    finally:
        await planning.close()
    assert plan.prompts[0].token_ids == model.encode("hello", add_special_tokens=True, param="")


async def test_no_process_can_be_started(tmp_path: Path) -> None:
    planning = PlanningProcess((str(tmp_path / "no such program"),))
    with pytest.raises(Overloaded, match="send it again"):
        await hello_of(planning)
    await planning.close()


@on_one_loop
async def test_a_request_that_ends_leaves_the_queue_and_its_plan_is_dropped(
    planning: PlanningProcess,
) -> None:
    await hello_of(planning)
    assert planning.pid is not None
    os.kill(planning.pid, signal.SIGSTOP)
    first = asyncio.create_task(planning.plan(COMPLETION, body_of(prompt="a", seed=1), CONTEXT))
    second = asyncio.create_task(planning.plan(COMPLETION, body_of(prompt="b", seed=1), CONTEXT))
    third = asyncio.create_task(hello_of(planning))
    await turns()
    for task in (first, second):
        task.cancel()
    await asyncio.wait({first, second})
    os.kill(planning.pid, signal.SIGCONT)
    assert (await third).prompts[0].token_ids == tiny_model().encode(
        "Hello", add_special_tokens=True, param="prompt"
    )


@on_one_loop
async def test_what_waits_is_bounded(
    planning: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hello_of(planning)
    assert planning.pid is not None
    os.kill(planning.pid, signal.SIGSTOP)
    monkeypatch.setattr(process, "MAX_WAITING_BYTES", 2 * len(HELLO))
    working = asyncio.create_task(hello_of(planning))
    await turns()
    waiting = [asyncio.create_task(hello_of(planning)) for _ in range(2)]
    await turns()
    with pytest.raises(Overloaded, match="2 large bodies wait"):
        await hello_of(planning)
    waiting.pop().cancel()
    await turns()
    waiting.append(asyncio.create_task(hello_of(planning)))
    os.kill(planning.pid, signal.SIGCONT)
    assert len(await asyncio.gather(working, *waiting)) == 3


@on_one_loop
async def test_a_body_larger_than_the_queue_is_planned_when_nothing_waits(
    planning: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_WAITING_BYTES", 1)
    assert (await hello_of(planning)).prompt_lengths


@on_one_loop
async def test_a_process_that_hangs_is_replaced(
    planning: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await hello_of(planning)
    first = planning.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(process, "MAX_PLAN_S", 0.01)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await hello_of(planning)
    assert not is_alive(first)
    monkeypatch.undo()
    assert await hello_of(planning) == wanted


@on_one_loop
async def test_a_reply_that_is_read_in_part_is_not_taken_for_the_next_one(
    planning: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await hello_of(planning)
    with monkeypatch.context() as patched:
        patched.setattr(process, "unpack_prompt", _fails)
        with pytest.raises(KeyError, match="bug"):
            await planning.plan(COMPLETION, body_of(prompt=["a", "b"], seed=SEED), CONTEXT)
    assert await hello_of(planning) == expected


def _fails(_: object) -> None:
    raise KeyError("bug")


async def test_closing_ends_the_process_and_what_waits(own_planning: PlanningProcess) -> None:
    await hello_of(own_planning)
    pid = own_planning.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asked = [asyncio.create_task(hello_of(own_planning)) for _ in range(3)]
    await turns()
    await own_planning.close()
    for task in asked:
        with pytest.raises(Overloaded, match="shutting down"):
            await task
    assert not is_alive(pid)
    with pytest.raises(Overloaded, match="shutting down"):
        await hello_of(own_planning)
    await own_planning.close()


def test_it_ends_with_its_input_and_by_no_signal_of_a_group(command: tuple[str, ...]) -> None:
    """Its router may be killed; and a service's stop sends SIGTERM to a router's children too."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        request = pack_request(COMPLETION, CONTEXT, HELLO)
        answers = []
        for _ in range(2):
            for part in pack_message(request):
                process.stdin.write(part)
            process.stdin.flush()
            answers.append(process.stdout.read1())  # type: ignore[attr-defined]
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGINT)
        assert all(answers)
        process.stdin.close()
        assert process.wait(60) == 0


def test_it_works_on_the_routers_event_loop(command: tuple[str, ...]) -> None:
    """uvloop has its own processes and pipes."""
    results: list[RequestPlan] = []

    async def scenario() -> None:
        planning = PlanningProcess(command)
        results.append(await hello_of(planning))
        large = body_of(prompt="Hello", seed=SEED, metadata="x" * (4 << 20))
        results.append(await planning.plan(COMPLETION, large, CONTEXT))
        first = planning.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        asked = asyncio.create_task(planning.plan(COMPLETION, large, CONTEXT))
        await turns()
        os.kill(first, signal.SIGKILL)
        results.append(await asked)
        assert planning.pid != first
        assert not is_alive(first)
        await planning.close()

    main: Coroutine[Any, Any, None] = scenario()
    uvloop.run(main)
    assert len(results) == 3
    assert results == [results[0]] * 3
