"""No body that could hold up the event loop is planned in the loop's process."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.gbnf import Gbnf
from router.api import generation
from router.api.bodies.asked import RequestKind
from router.api.planning import body_planner
from router.api.planning.body_planner import INLINE_BODY_BYTES, MAX_THREAD_BODY_BYTES, BodyPlanner
from router.api.planning.planner import Planner, RequestPlan
from tests.support.http.edge_model import CONTEXT, tiny_model
from tests.support.http.http_edge import PlansHere, TriesHere, make_edge
from tests.support.http.scripted_generator import ScriptedGenerator, says


def body_of(num_bytes: int) -> bytes:
    """A completion's body of exactly that size."""
    body = json.dumps({"model": "tiny", "prompt": "Hello"}).encode()
    return body + b" " * (num_bytes - len(body))


class NotedPlanner(Planner):
    """Notes the thread of each plan."""

    threads: list[threading.Thread]

    def plan(self, kind: RequestKind, raw: bytes) -> RequestPlan:
        self.threads.append(threading.current_thread())
        return super().plan(kind, raw)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads of this process that planned a body."""
    noted: list[threading.Thread] = []
    monkeypatch.setattr(NotedPlanner, "threads", noted, raising=False)
    monkeypatch.setattr(body_planner, "Planner", NotedPlanner)
    return noted


@pytest.mark.covers("F142")
@pytest.mark.parametrize(
    ("num_bytes", "where"),
    [
        (INLINE_BODY_BYTES, "loop"),
        (INLINE_BODY_BYTES + 1, "thread"),
        (MAX_THREAD_BODY_BYTES, "thread"),
        (MAX_THREAD_BODY_BYTES + 1, "process"),
        (10 << 20, "process"),
    ],
)
async def test_the_size_of_a_body_decides_where_it_is_planned(
    threads: list[threading.Thread], num_bytes: int, where: str
) -> None:
    process = PlansHere(tiny_model())
    planner = BodyPlanner(tiny_model(), process, TriesHere(tiny_model()))
    plan = await planner.plan(RequestKind.COMPLETION, body_of(num_bytes), CONTEXT)
    assert plan.prompt_lengths == (len(tiny_model().encode("Hello", **TEXT)),)
    assert process.sizes == ([num_bytes] if where == "process" else [])
    main = threading.main_thread()
    on = ["loop" if thread is main else "thread" for thread in threads]
    assert on == ([] if where == "process" else [where])


@pytest.mark.parametrize("padding", [0, INLINE_BODY_BYTES])
async def test_gbnf_is_translated_by_a_trial_alone(padding: int) -> None:
    """A translation may take seconds, which would stop every stream of the router."""
    large, trials = PlansHere(tiny_model()), TriesHere(tiny_model())
    planner = BodyPlanner(tiny_model(), large, trials)
    fields = {"prompt": "Hello", "guided_grammar": 'root ::= "a" | "b"'}
    body = json.dumps(fields).encode() + b" " * padding
    lark = Grammar(GrammarKind.LARK, 'start: "a"\n     | "b"\n\n')
    for _ in range(2):
        plan = await planner.plan(RequestKind.COMPLETION, body, CONTEXT)
        assert plan.sampling.grammar == lark
    assert large.sizes == []
    gbnf = Gbnf('root ::= "a" | "b"', "guided_grammar")
    assert [trial.grammar for trial in trials.tried] == [gbnf, lark, gbnf], "one compilation"


@pytest.mark.parametrize("padding", [0, MAX_THREAD_BODY_BYTES])
async def test_each_grammar_is_tried_once_for_its_client(padding: int) -> None:
    """Whatever the size of its body; what is refused is tried again."""
    large, trials = PlansHere(tiny_model()), TriesHere(tiny_model())
    planner = BodyPlanner(tiny_model(), large, trials)
    fields = {"prompt": "Hello", "guided_json": {"type": "null"}}
    body = json.dumps(fields).encode() + b" " * padding
    for client in ("one", "two"):
        await planner.plan(RequestKind.COMPLETION, body, CONTEXT, client)
    assert trials.clients == ["one"]
    bad = json.dumps({"prompt": "Hello", "guided_regex": "("}).encode() + b" " * padding
    for client in ("one", "two"):
        with pytest.raises(InvalidRequest, match="cannot be followed"):
            await planner.plan(RequestKind.COMPLETION, bad, CONTEXT, client)
    assert trials.clients == ["one", "one", "two"]
    assert len(large.sizes) == (4 if padding else 0)


@pytest.mark.covers("F142")
async def test_one_thread_plans_all_bodies_of_medium_size(
    threads: list[threading.Thread],
) -> None:
    """Several would hold the interpreter's lock in turn, and the loop would wait for all."""
    planner = BodyPlanner(tiny_model(), PlansHere(tiny_model()), TriesHere(tiny_model()))
    body = body_of(MAX_THREAD_BODY_BYTES)
    kind = RequestKind.COMPLETION
    await asyncio.gather(*(planner.plan(kind, body, CONTEXT) for _ in range(8)))
    assert len(threads) == 8
    assert len(set(threads)) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_apis_give_large_bodies_to_the_process(
    threads: list[threading.Thread], path: str
) -> None:
    process = PlansHere(tiny_model())
    edge = make_edge(large_bodies=process)
    fields: dict[str, Any] = {"model": "tiny"}
    if path.startswith("/v1/chat"):
        fields["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        fields["prompt"] = "Hello"
    body = json.dumps(fields | {"metadata": "x" * (MAX_THREAD_BODY_BYTES + 1)})
    async with edge.client() as client:
        answer = await client.post(path, content=body)
    assert answer.status_code == 200
    assert process.sizes == [len(body)]
    assert threads == []


async def test_an_error_of_the_process_is_the_requests() -> None:
    class Refuses:
        async def plan(self, kind: RequestKind, body: bytes, max_model_len: int) -> RequestPlan:
            raise InvalidRequest("no", param="prompt")

    edge = make_edge(large_bodies=Refuses())
    async with edge.client() as client:
        answer = await client.post("/v1/completions", content=body_of(MAX_THREAD_BODY_BYTES + 1))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("num_prompts", "num_allowed", "num_turns", "num_per_turn"),
    [(128, 0, 13, 10), (10, 0, 1, 10), (10, 200, 2, 5)],
    ids=["many tokens", "few tokens", "many allowed tokens"],
)
async def test_prompts_of_many_tokens_start_in_several_turns(
    monkeypatch: pytest.MonkeyPatch,
    num_prompts: int,
    num_allowed: int,
    num_turns: int,
    num_per_turn: int,
) -> None:
    """Placing a million tokens in one turn of the event loop would hold up everybody's tokens."""
    monkeypatch.setattr(generation, "TOKENS_PER_TURN", 2000)
    turn, turns_of_calls = 0, []

    class Notes(ScriptedGenerator):
        def generate(self, *arguments: Any, **more: Any) -> Any:
            turns_of_calls.append(turn)
            return super().generate(*arguments, **more)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    counting = asyncio.create_task(count_turns())
    await asyncio.sleep(0)  # it waits for the next turn now
    edge = make_edge(generator=Notes(says("Hello world")))
    body = {"model": "tiny", "prompt": [[7] * 200] * num_prompts, "max_tokens": 20}
    body["allowed_token_ids"] = list(range(num_allowed))
    async with edge.client() as client:
        answer = await client.post("/v1/completions", json=body)
    counting.cancel()
    assert [choice["text"] for choice in answer.json()["choices"]] == ["Hello world"] * num_prompts
    assert len(set(turns_of_calls)) == num_turns
    assert max(map(turns_of_calls.count, turns_of_calls)) == num_per_turn


TEXT: dict[str, Any] = {"add_special_tokens": True, "param": "prompt"}
