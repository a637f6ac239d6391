"""A router, a prefill and a decode node that serve the demo model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.cluster.cluster import ClusterSpec, NodeSpec, running
from tests.redis_server import redis_server

_NODES = (
    # Prompts take several steps, and prefixes are cached.
    NodeSpec("prefill-1", Role.PREFILL, ("--max-num-batched-tokens", "64")),
    NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0")),
)


@contextmanager
def demo_cluster() -> Iterator[tuple[int, Path]]:
    """Run the cluster; the block gets the router's port and the model's folder."""
    model = demo_model_folder()
    spec = ClusterSpec(
        name="clients",
        model=model,
        nodes=_NODES,
        flags=("--num-threads", "1", "--kv-cache-memory", "64MiB"),
    )
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-clients-") as folder,
        redis_server() as redis,
        running([spec], redis, Path(folder)) as (cluster,),
    ):
        port = urlsplit(cluster.url).port
        assert port is not None
        yield port, model
