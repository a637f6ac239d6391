"""Two routers on one Redis, and the official client: both see one cluster, and it answers alike."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.models.tiny_model import prompt_tokens


@pytest.mark.covers("F82")
def test_two_routers_answer_alike_side_by_side(tiny_cluster: Cluster) -> None:
    requests: list[Fields] = [
        {"prompt": prompt_tokens(40 + i, salt=61), "max_tokens": 60, "temperature": 0.8, "seed": i}
        for i in range(8)
    ]
    with Api(tiny_cluster.urls[0], "tiny") as one, Api(tiny_cluster.urls[1], "tiny") as other:
        wanted = [one.complete(**request) for request in requests]
        with ThreadPoolExecutor(2) as threads:
            answers = threads.map(lambda api: api.complete_all(requests), (one, other))
            assert list(answers) == [wanted, wanted]
        for api in (one, other):
            cluster = api.http.get("/v1/cluster").json()
            assert [node["node_id"] for node in cluster["nodes"]] == ["decode-1", "prefill-1"]
            assert api.http.get("/ready").status_code == 200


def test_one_router_s_abort_leaves_the_other_s_request_alone(tiny_cluster: Cluster) -> None:
    fields: Fields = {"prompt": prompt_tokens(40, salt=62), "max_tokens": 800, "temperature": 0}
    with Api(tiny_cluster.urls[0], "tiny") as one, Api(tiny_cluster.urls[1], "tiny") as other:
        with one.stream(logprobs=0, ignore_eos=True, **fields) as kept:
            kept.read_tokens(2)
            with other.stream(ignore_eos=True, **fields) as left:
                left.read_tokens(2)
            answer = kept.read_rest()
        assert answer == other.complete(ignore_eos=True, **fields)


def test_the_official_client_works_unchanged(tiny_cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{tiny_cluster.url}/v1", api_key="none", max_retries=0)
    with contextlib.closing(client):
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=20,
            temperature=0,
        )
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        assert text == whole.choices[0].message.content
        streamed_usage, whole_usage = chunks[-1].usage, whole.usage
        assert streamed_usage is not None
        assert whole_usage is not None
        assert streamed_usage.completion_tokens == whole_usage.completion_tokens
        assert streamed_usage.prompt_tokens == whole_usage.prompt_tokens
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-9", prompt="a")
        assert missing.value.code == "model_not_found"
