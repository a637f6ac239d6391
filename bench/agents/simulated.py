"""Agents on a simulated cluster: `python -m bench.agents.simulated --json`.

Sessions with the distributions of `bench/agents/sessions.py`, in the lengths of an 8B model's
users, go to 8 prefill and 8 decode nodes of a profile on a virtual clock (`simulator/`). A turn
comes when its agent has thought about the answer to the one before, which is taken to last as long
as `ANSWER_S`: the clients of the simulator do not wait. Sessions are not named, so the router goes
by what nodes report.

Regimes:

    fits      the pools of the profile, which hold almost all that is asked
    quarter   the pools of all prefill nodes together hold a quarter of it

Ways, and `mixed` beside them:

    pools     nodes keep what is in their pools
    tiers     nodes keep in host memory too what the pools evict (`--prefix-host-memory`)
    mixed     one mixed node with the memory of 16 pools, where everything is local; sessions come
              to it a sixteenth as often, so that it has as much to do as one of 16

Figures: prompt tokens, those that were computed, the share that was found and where it was found,
times to the first token in milliseconds, over all turns and by turn, and the seconds of one core
that the simulation took. `hit_share` of `tiers` and `pools` is over what `mixed` found.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from bench.agents.figures import first_tokens
from bench.agents.sessions import Session, Shape, make_sessions
from bench.command import flags_of, print_figures
from common.errors import ConfigError
from common.kv.blocks import blocks_for
from common.long_lived import exclude_from_collection
from common.nodes import Role
from common.settings.config import Config, EngineConfig
from simulator.clients import client_requests
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.profile import FOLDER, DeviceProfile, read_profile
from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest

SHAPE = Shape(
    num_sessions=200, num_systems=4, system_tokens=4096, new_tokens=1500, new_sigma=1.0,
    answer_tokens=250, answer_sigma=0.8, think_s=15.0,
)  # fmt: skip
SESSIONS_PER_S = 0.5
ANSWER_S = 5.0
NUM_EACH = 8
"""Prefill nodes, and decode nodes."""
HOST_MEMORY = 64 << 30
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A request of the trace, and its turn."""

    trace: TraceRequest
    turn: int


@dataclass(frozen=True, slots=True)
class Served:
    """The share of all prompt tokens that was not computed, and all figures by name."""

    hit_rate: float
    figures: dict[str, object]


def asked_turns(sessions: Sequence[Session], sessions_per_s: float) -> list[AskedTurn]:
    """Return what is asked, ordered by arrival. Sessions begin at equal distances.

    Prompts share what is whole in 512 tokens, as those of traces do.
    """
    new_ids, systems = count(), dict[tuple[int, ...], tuple[int, ...]]()
    asked = [
        turn
        for number, session in enumerate(sessions)
        for turn in _turns(session, number / sessions_per_s, new_ids, systems)
    ]
    return sorted(asked, key=lambda one: one.trace.arrival_s)


def _turns(
    session: Session,
    begins_s: float,
    new_ids: count[int],
    systems: dict[tuple[int, ...], tuple[int, ...]],
) -> Iterator[AskedTurn]:
    num_system = len(session.system)
    if session.system not in systems:
        systems[session.system] = _grown((), 0, num_system, new_ids)
    said = [(num_system, systems[session.system])]
    at_s = begins_s
    for index, turn in enumerate(session.turns):
        num_before, before = said[turn.parent + 1]
        num_prompt = num_before + len(turn.new_tokens)
        ids = _grown(before, num_before, num_prompt, new_ids)
        at_s += turn.think_s
        yield AskedTurn(TraceRequest(at_s, num_prompt, turn.num_answer_tokens, ids), index)
        num_after = num_prompt + turn.num_answer_tokens
        said.append((num_after, _grown(ids, num_prompt, num_after, new_ids)))
        at_s += ANSWER_S


def _grown(
    ids: tuple[int, ...], num_tokens: int, num_after: int, new_ids: count[int]
) -> tuple[int, ...]:
    """Return the ids of a longer text. The last one changes where it is not whole."""
    whole = ids[: num_tokens // TOKENS_PER_HASH_ID]
    num_new = blocks_for(num_after, TOKENS_PER_HASH_ID) - len(whole)
    return (*whole, *(next(new_ids) for _ in range(num_new)))


def num_distinct_tokens(asked: Sequence[AskedTurn]) -> int:
    """Return the tokens of all prompts, each once that several share."""
    return TOKENS_PER_HASH_ID * len({one for turn in asked for one in turn.trace.hash_ids})


def served(
    asked: Sequence[AskedTurn], profile: DeviceProfile, nodes: dict[Role, int], host_memory: int
) -> Served:
    """Serve what is asked by these nodes; return the figures."""
    engine = EngineConfig(block_size=BLOCK_SIZE, prefix_host_memory=host_memory)
    config = Config(role=Role.DECODE, engine=engine)
    began_s = time.process_time()
    cluster = SimulatedCluster(ClusterSetup(profile=profile, num_nodes=nodes, config=config))
    traces = [one.trace for one in asked]
    clients = client_requests(traces, max_model_len=cluster.max_model_len, seed=0)
    answered = cluster.run(clients)
    took_s = time.process_time() - began_s
    num_prompt = sum(client.trace.num_prompt for client in clients)
    counters = [node.scheduler.statistics().counters for node in cluster.nodes]
    num_computed = sum(one.num_chunk_tokens - one.num_recomputed_tokens for one in counters)
    found: Counter[str] = Counter()
    for node in cluster.nodes:
        if cluster.role_of(node.me) is not Role.DECODE:
            found.update(node.scheduler.statistics().counters.prefix_blocks_found)
    hit_rate = 1 - num_computed / num_prompt
    num_found = max(1, found.total())
    figures = {
        "requests": len(answered),
        "refused": len(asked) - len(clients),
        "prompt_tokens": num_prompt,
        "computed_tokens": num_computed,
        "hit_rate": round(hit_rate, 4),
        "hit_rate_by_tier": {
            tier: round(hit_rate * number / num_found, 4) for tier, number in found.items()
        },
        "pulled_tokens": sum(one.num_pulled_tokens for one in counters),
        **first_tokens([(asked[one.client.index].turn, one.ttft_s) for one in answered]),
        "cpu_s": round(took_s, 1),
    }
    return Served(hit_rate, figures)


def measure(profile: DeviceProfile, shape: Shape, seed: int) -> dict[str, object]:
    """Serve all regimes in all ways."""
    sessions = make_sessions(shape, seed)
    asked = asked_turns(sessions, SESSIONS_PER_S)
    alone = asked_turns(sessions, SESSIONS_PER_S / (2 * NUM_EACH))
    apart = {Role.PREFILL: NUM_EACH, Role.DECODE: NUM_EACH, Role.MIXED: 0}
    one_mixed = {Role.PREFILL: 0, Role.DECODE: 0, Role.MIXED: 1}
    of_quarter = num_distinct_tokens(asked) * profile.kv_bytes_per_token // (4 * NUM_EACH)
    large = replace(profile, kv_memory_bytes=2 * NUM_EACH * profile.kv_memory_bytes)
    mixed = served(alone, large, one_mixed, 0)
    result: dict[str, object] = {"mixed": mixed.figures}
    all_found = max(mixed.hit_rate, 1e-9)
    for name, memory in (("fits", profile.kv_memory_bytes), ("quarter", of_quarter)):
        small = replace(profile, kv_memory_bytes=memory)
        ways = {
            "pools": served(asked, small, apart, 0),
            "tiers": served(asked, small, apart, HOST_MEMORY),
        }
        result[name] = {
            **{way: one.figures for way, one in ways.items()},
            **{f"{way}.hit_share": round(one.hit_rate / all_found, 3) for way, one in ways.items()},
        }
    return result


def main() -> None:
    """Parse, serve, print one JSON line last."""
    flags = flags_of("bench.agents.simulated", __doc__)
    flags.add_argument("--profile", type=Path, default=FOLDER / "8b_h100.json")
    flags.add_argument("--sessions", type=int, default=SHAPE.num_sessions)
    flags.add_argument("--seed", type=int, default=1)
    options = flags.parse_args()
    if options.sessions < 1:
        flags.error(f"--sessions is {options.sessions}: wanted at least 1")
    try:
        exclude_from_collection()
        profile = read_profile(options.profile)
        result = measure(profile, replace(SHAPE, num_sessions=options.sessions), options.seed)
    except ConfigError as error:
        sys.exit(str(error))
    print_figures(result, is_one_line=options.json)


if __name__ == "__main__":
    main()
