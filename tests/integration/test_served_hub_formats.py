"""A folder in AWQ on a cluster: its answers are those of the same weights in float32."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import save_file

from common.nodes import Role
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import ClusterSpec, NodeSpec, running
from tests.support.models.hub_formats import Awq, pack_folder
from tests.support.models.tiny_model import make_tiny_model, tiny_config, tiny_weights
from tests.support.stores.redis_server import RedisServer

PROMPTS = ("ab", "The rain", "{0}")


def spec(model: Path) -> ClusterSpec:
    return ClusterSpec(
        name=model.name,
        model=model,
        nodes=(NodeSpec("mixed-1", Role.MIXED),),
        flags=(
            *("--num-threads", "1", "--kv-cache-memory", "16MiB"),
            *("--activation-dtype", "float32"),
        ),
    )


def test_answers_of_a_cluster_are_those_of_the_same_weights(
    cluster_redis: RedisServer, cluster_folder: Path, tmp_path: Path
) -> None:
    """With activations in float32: in int8, products of groups differ from those of floats."""
    packed, wide = (make_tiny_model(tmp_path / name) for name in ("packed", "wide"))
    values = pack_folder(packed, tiny_config(), tiny_weights(7), Awq(32))
    save_file(values, wide / "model.safetensors")
    said = []
    with running([spec(packed), spec(wide)], cluster_redis, cluster_folder) as clusters:
        for cluster in clusters:
            with Api(cluster.url, cluster.spec.name) as api:
                said.append(
                    [api.complete(prompt, max_tokens=40, temperature=0) for prompt in PROMPTS]
                )
    assert said[0] == said[1]
    assert len({answer.text for answer in said[0]}) == len(PROMPTS)
