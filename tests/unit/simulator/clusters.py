"""Small simulated clusters, and requests for them."""

from __future__ import annotations

import random
from dataclasses import replace

from common.nodes import Role
from common.settings.config import Config, EngineConfig
from simulator.clients import ClientRequest, client_requests
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.profile import FOLDER, read_profile
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest

P, D, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
COST = StepCost(
    overhead_s=2.24e-3, weights_s=5.03e-3, token_s=25e-6, context_s=49e-9, pair_s=1.5e-9,
    block_copy_s=190e-6,
)  # fmt: skip
PROFILE = replace(read_profile(FOLDER / "8b_h100.json"), step=COST)
BLOCK = PROFILE.kv_bytes_per_token * 64


def trace(count: int = 40, *, gap_s: float = 0.02, seed: int = 0) -> list[TraceRequest]:
    """Requests of some conversations: each prompt begins with the one before it."""
    rng = random.Random(seed)
    turns: dict[int, int] = {}
    found = []
    for index in range(count):
        talk = rng.randrange(count // 4)
        turns[talk] = turns.get(talk, 0) + 1
        ids = tuple(talk * 100 + turn for turn in range(turns[talk]))
        num_prompt = 512 * len(ids) - rng.randrange(511)
        found.append(TraceRequest(index * gap_s, num_prompt, rng.randrange(1, 200), ids))
    return found


def setup_of(
    num_nodes: dict[Role, int], *, num_blocks: int = 400, **sections: object
) -> ClusterSetup:
    engine = EngineConfig(max_num_seqs=16, max_num_batched_tokens=1024)
    config = replace(Config(role=D, engine=engine), **sections)  # type: ignore[arg-type]
    profile = replace(PROFILE, kv_memory_bytes=num_blocks * BLOCK)
    return ClusterSetup(profile=profile, num_nodes=num_nodes, config=config)


def clients_of(cluster: SimulatedCluster, requests: list[TraceRequest]) -> list[ClientRequest]:
    return client_requests(requests, max_model_len=cluster.max_model_len, seed=0)
