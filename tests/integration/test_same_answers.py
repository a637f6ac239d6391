"""Chunks, batches, prefix hits and handoffs never change what a request answers: demo model.

The reference is a mixed node that keeps no prefix cache and answers one request at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.structured.schemas import SCHEMAS
from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from router.text.text_model import TextModel
from tests.support.clocks.patience import PATIENT
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

REFERENCE_PATH = Path(__file__).parents[1] / "data" / "demo_reference.json"
PROSE_PATH = Path(__file__).parents[2] / "LICENSE"
BLOCK_SIZE = 64
TIE_MARGIN = 1e-3
"""Logits closer than this may change places by the rounding of float32 alone."""

LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 212)
WAYS: dict[str, Fields] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 20240607},
}
NUM_TOKENS = 12
MODEL = "SmolLM2-135M-Instruct"


def demo_specs() -> list[ClusterSpec]:
    flags = ("--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--num-threads", "1")

    def mixed(name: str, *own: str) -> ClusterSpec:
        node = NodeSpec("mixed-1", Role.MIXED, own)
        return ClusterSpec(name=name, model=demo_model_folder(), nodes=(node,), flags=flags)

    handoff = ClusterSpec(
        name="handoff",
        model=demo_model_folder(),
        nodes=(
            NodeSpec(
                "prefill-1",
                Role.PREFILL,
                ("--max-num-batched-tokens", "64"),
                {PATIENT: "yes"},
            ),
            NodeSpec(
                "decode-1",
                Role.DECODE,
                ("--local-prefill-threshold", "0", "--max-num-batched-tokens", "512"),
            ),
        ),
        flags=flags,
        has_patient_routers=True,
    )
    # The reference has two threads, and all others have one.
    own = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "2048", "--num-threads", "2")
    alone = mixed("alone", *own)
    exact = mixed("exact", "--activation-dtype", "float32")
    return [alone, mixed("chunked", "--max-num-batched-tokens", "32"), handoff, exact]


@pytest.fixture(scope="module")
def clusters(cluster_redis: RedisServer, cluster_folder: Path) -> Iterator[dict[str, Cluster]]:
    with running(demo_specs(), cluster_redis, cluster_folder) as started:
        yield {cluster.spec.name: cluster for cluster in started}


@pytest.fixture(autouse=True)
def _settled(clusters: dict[str, Cluster]) -> Iterator[None]:
    yield
    for cluster in clusters.values():
        cluster.check_settled()


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel.load(demo_model_folder(), MODEL, 0)


@pytest.fixture(scope="module")
def requests(text_model: TextModel) -> list[Fields]:
    """Prompts of every length that means something to blocks, in both ways of drawing tokens."""
    prose = text_model.encode(PROSE_PATH.read_text(), add_special_tokens=False, param="prompt")
    prompts = {length: list(prose[100 * i :][:length]) for i, length in enumerate(LENGTHS)}
    # The second of a pair that has its first half in common.
    prompts[213] = prompts[212][:106] + list(prose[1500:1607])
    return [
        {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **way}
        for prompt in prompts.values()
        for way in WAYS.values()
    ]


@pytest.fixture(scope="module")
def wanted(clusters: dict[str, Cluster], requests: list[Fields]) -> list[Answer]:
    """What every request answers on a node of its own."""
    with Api(clusters["alone"].url, MODEL) as api:
        return [api.complete(**request) for request in requests]


def same(answers: list[Answer | ApiFailure], wanted: list[Answer]) -> None:
    assert answers == wanted
    assert all(len(answer.tokens) == NUM_TOKENS for answer in wanted)


def test_a_batch_answers_as_each_request_alone(
    clusters: dict[str, Cluster], requests: list[Fields], wanted: list[Answer]
) -> None:
    with Api(clusters["alone"].url, MODEL) as api:
        same(api.complete_all(requests), wanted)


def test_sampling_is_not_greedy(wanted: list[Answer]) -> None:
    assert all(greedy != sampled for greedy, sampled in zip(wanted[::2], wanted[1::2], strict=True))


def test_short_chunks_in_a_batch_give_the_same_answers(
    clusters: dict[str, Cluster], requests: list[Fields], wanted: list[Answer]
) -> None:
    with Api(clusters["chunked"].url, MODEL) as api:
        same(api.complete_all(requests), wanted)
        # Once more: now with every full block in the prefix cache.
        hits = api.complete_all(requests)
    same(hits, wanted)
    for request, answer in zip(requests, hits, strict=True):
        assert isinstance(answer, Answer)
        num_full_blocks = (len(request["prompt"]) - 1) // BLOCK_SIZE
        assert answer.num_cached_tokens == num_full_blocks * BLOCK_SIZE


def test_a_handoff_gives_the_same_answers(
    clusters: dict[str, Cluster], requests: list[Fields], wanted: list[Answer]
) -> None:
    cluster = clusters["handoff"]
    with Api(cluster.url, MODEL) as api:
        # Every prompt once, in one way and the other by turns.
        turns = [2 * i + i % 2 for i in range(len(requests) // 2)]
        alone = [api.complete(**requests[turn]) for turn in turns]
        assert alone == [wanted[turn] for turn in turns]
        # The last one shares its first half with the one before, and found that half.
        assert alone[-1].num_cached_tokens == 106 // BLOCK_SIZE * BLOCK_SIZE
        placements = api.http.get("/v1/cluster").json()["recent_placements"]
        assert [p for p in placements if not p["prefill"]] == [], "all prompts were handed off"
        same(api.complete_all(requests), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_turns_whose_history_is_pulled_answer_the_same(
    clusters: dict[str, Cluster], text_model: TextModel, way: str
) -> None:
    """The decode node has the answers of earlier turns; the prefill node takes them from there."""
    prose = text_model.encode(PROSE_PATH.read_text(), add_special_tokens=False, param="prompt")
    words = list(reversed(prose))[500 * list(WAYS).index(way) :]  # which no other test asks
    cached: dict[str, list[int]] = {}
    answers: dict[str, list[list[int]]] = {}
    for name in ("alone", "handoff"):
        history: list[int] = []
        answers[name], cached[name] = [], []
        with Api(clusters[name].url, MODEL) as api:
            for turn in range(3):
                history += words[100 * turn :][:100]
                fields = {"prompt": history, "max_tokens": 30, "ignore_eos": True, **WAYS[way]}
                body = {"model": MODEL, "return_token_ids": True, **fields}
                reply = api.http.post("/v1/completions", json=body).raise_for_status().json()
                answers[name].append(reply["choices"][0]["token_ids"])
                cached[name].append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
                history += answers[name][-1]
    assert answers["handoff"] == answers["alone"]
    # Of 130 tokens before the second turn the last one was never computed; 100 were a prompt.
    assert cached["handoff"][:2] == [0, 129 // BLOCK_SIZE * BLOCK_SIZE]


def reference() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(REFERENCE_PATH.read_text(encoding="utf-8"))
    return entries


CONSTRAINED = ("name_age_city", "umlauts")


def test_answers_under_schemas_are_the_same_and_follow_them(clusters: dict[str, Cluster]) -> None:
    """Alone, in chunks and over a handoff."""
    asked: list[Fields] = [
        {
            "prompt": f"One {name.replace('_', ' ')}, as JSON: ",
            "max_tokens": 90,
            "seed": 5,
            "guided_json": SCHEMAS[name],
        }
        for name in CONSTRAINED
    ]
    answers = {}
    for name in ("alone", "chunked", "handoff"):
        with Api(clusters[name].url, MODEL) as api:
            found = api.complete_all(asked)
        answers[name] = [one for one in found if isinstance(one, Answer)]
        assert len(answers[name]) == len(asked), found
    assert answers["chunked"] == answers["handoff"] == answers["alone"]
    whole = [one.finish_reason == "stop" for one in answers["alone"]]
    assert sum(whole) >= 1
    for name, answer in zip(CONSTRAINED, answers["alone"], strict=True):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMAS[name])


def test_answers_are_those_of_transformers(
    clusters: dict[str, Cluster], text_model: TextModel
) -> None:
    """On the dequantised weights; int8 activations, the default, change some tokens."""
    entries = reference()
    num_compared = 0
    with Api(clusters["exact"].url, MODEL) as api, ThreadPoolExecutor(len(entries)) as threads:
        for entry, answer in zip(entries, threads.map(partial(ask, api), entries), strict=True):
            assert answer.usage["prompt_tokens"] == len(entry["prompt_token_ids"])
            tokens = [text_model.describe_token(token).text for token in entry["token_ids"]]
            ties = [i for i, margin in enumerate(entry["margins"]) if margin < TIE_MARGIN]
            num_clear = ties[0] if ties else len(tokens)
            assert list(answer.tokens[:num_clear]) == tokens[:num_clear], entry["text"]
            num_compared += num_clear
    assert num_compared >= 0.8 * sum(len(entry["token_ids"]) for entry in entries)


def ask(api: Api, entry: dict[str, Any]) -> Answer:
    call = api.chat if entry["kind"] == "chat" else api.complete
    num_tokens = len(entry["token_ids"])
    return call(entry["text"], temperature=0, max_tokens=num_tokens, ignore_eos=True)


def test_transformers_still_says_so() -> None:
    """Where it is installed: the stored answers are what it gives now."""
    pytest.importorskip("torch", reason="torch is not installed: the stored answers are used")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: the stored answers are used"
    )
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model_folder(), dtype=torch.float32, gguf_file="weights.gguf"
    )
    for entry in reference()[:3]:
        prompt = torch.tensor([entry["prompt_token_ids"]])
        known = torch.tensor([entry["prompt_token_ids"] + entry["token_ids"][:-1]])
        with torch.no_grad():
            logits = model.eval()(known).logits[0, prompt.shape[1] - 1 :]
        assert logits.argmax(-1).tolist() == entry["token_ids"]
