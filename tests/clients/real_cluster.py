"""A real cluster on the demo model, for clients that measure servers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.cluster.cluster import ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import redis_server


@contextmanager
def real_cluster() -> Iterator[tuple[int, Path]]:
    """Run a router, a prefill and a decode node; the block gets the port and the model's folder.

    At its end nothing is held for any request.
    """
    model = demo_model_folder()
    spec = ClusterSpec(
        name="clients",
        model=model,
        nodes=(
            # Prompts take several steps, and prefixes are cached.
            NodeSpec("prefill-1", Role.PREFILL, ("--max-num-batched-tokens", "64")),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0")),
        ),
        flags=("--num-threads", "1", "--kv-cache-memory", "64MiB"),
    )
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-clients-") as folder,
        redis_server() as store,
        running([spec], store, Path(folder)) as (cluster,),
    ):
        yield int(cluster.url.rpartition(":")[2]), model
        cluster.check_settled()
