"""Models that are odd in several ways, in a cluster; `make test-models` has each way in `up`."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from common.nodes import Role
from tests.support.cluster.cluster import ClusterSpec, NodeSpec, running
from tests.support.models.odd_models import check_chats, check_completions, make_odd_model
from tests.support.stores.redis_server import RedisServer

SHELVES = {
    "ends by its tokenizer, which is too large": (
        "ends by its tokenizer",
        "has one special token too many",
        "keeps one token by default",
        "takes one system message",
    ),
    "ends beyond its vocabulary, and drops spaces": (
        "has the tokenizer of SentencePiece",
        "has one plain token too many",
        "has an end beyond the vocabulary",
        "has floats for whole numbers",
    ),
}


@pytest.mark.covers("K07", "K08", "K09")
@pytest.mark.parametrize("name", SHELVES)
def test_an_odd_model_serves_all_kinds_of_answers(
    name: str, tmp_path: Path, cluster_redis: RedisServer
) -> None:
    spec = ClusterSpec(
        name=f"odd_{list(SHELVES).index(name)}",
        model=make_odd_model(tmp_path / "odd", *SHELVES[name]),
        nodes=(NodeSpec("mixed-1", Role.MIXED, ("--kv-cache-memory", "16MiB")),),
        routers=(("--tool-template", "builtin"),),
    )
    with (
        running([spec], cluster_redis, tmp_path) as (cluster,),
        httpx.Client(base_url=f"{cluster.url}/v1", timeout=60) as client,
    ):
        check_completions(client)
        check_chats(client)
        cluster.check_settled()
