"""Speed of KV transfer between two processes of this machine: `python -m bench.transfer --json`.

256 MiB of blocks, adjacent in both pools or scattered over both, in three sizes: the keys of a
block in one layer are 64, 16 or 4 KiB, and so are its values. Every way takes its turn in every
round, so that a noisy machine is noisy for all; figures are medians over the rounds, in GB/s (10^9
bytes). Every move's bytes are compared once per way and pattern.

    raw_socket      TCP over loopback, sendall to recv_into, straight into the pool
    memcpy          one thread, within one process
    mooncake_tcp    Mooncake's Transfer Engine called directly, over TCP
    zmq, shm        the connectors as nodes use them: checksums, acknowledgements, commit
    …_2_lanes, …_4_lanes  the same with --kv-lanes 2 and 4
    zmq_encrypted   the same as zmq, between nodes with a key (CURVE)
    rdma_python     the rdma connector with writes that take no time: what its own work allows
    rdma_over_direct  what the rdma connector reaches of the same writes made with Mooncake itself;
                    it needs RDMA devices: `make test-rdma` measures it
    …_over_…        ratios of those figures
    memory_beyond_pools_mib  most memory of sender and receiver besides their pools
    cpu_s_per_gb    CPU seconds of sender and receiver per 10^9 bytes
    cpu_us_per_block  CPU microseconds of sender and receiver by thread, per block and layer
    push            microseconds that one call of `push` keeps its caller, by its number of blocks:
                    a layer of 8 sequences every millisecond, on zmq

With --json the figures of 64 KiB are at the top level, and those of each size in `piece_kib`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.transfer import connector_ends, mooncake_tcp, plain, push_calls
from bench.transfer.processes import Move, Pair
from bench.transfer.ways import Way
from bench.transfer.workload import (
    MOVED_BYTES,
    PATTERNS,
    Workload,
    private_memory,
    shared_memory,
    workload,
)
from kv_transfer.zmq.curve_keys import new_curve_keys

_GB = 1e9
PIECE_KIB = (64, 16, 4)
LANES = (2, 4)
CONNECTORS = (
    "zmq",
    *(f"zmq_{count}_lanes" for count in LANES),
    "zmq_encrypted",
    "shm",
    *(f"shm_{count}_lanes" for count in LANES),
    "rdma_python",
)


@dataclass(slots=True)
class Figures:
    """Measurements of one way: moves by pattern, and the memory of its two processes."""

    moves: dict[str, list[Move]] = field(default_factory=dict)
    memory_bytes: tuple[int, int] = (0, 0)

    def speed(self, pattern: str) -> float:
        """Return median GB/s."""
        return MOVED_BYTES / _GB / statistics.median(move.seconds for move in self.moves[pattern])

    def cpu(self, per: float) -> list[dict[str, float]]:
        """Return median CPU seconds of sender and receiver by thread, times `per`."""
        moves = [move for moves in self.moves.values() for move in moves]
        ends = [move.sender_cpu_s for move in moves], [move.receiver_cpu_s for move in moves]
        return [
            {
                name: round(per * statistics.median(one.get(name, 0.0) for one in spans), 3)
                for name in sorted({name for one in spans for name in one})
            }
            for spans in ends
        ]


_COPY_KERNELS = ("kv_transfer.lanes.fused_copy",)
"""Modules that compile at their import: an end imports them before its memory is measured."""


def ways() -> tuple[list[Way], dict[str, str]]:
    """Return the ways that can be measured here, and the reasons why others cannot, by name."""
    keys = new_curve_keys()
    found = [
        Way("raw_socket", plain.SocketReceiver, plain.SocketSender, ("adjacent",)),
        Way(
            "zmq",
            connector_ends.ConnectorReceiver,
            connector_ends.ConnectorSender,
            imports=_COPY_KERNELS,
        ),
        Way(
            "zmq_encrypted",
            partial(connector_ends.ConnectorReceiver, keys=keys),
            partial(connector_ends.ConnectorSender, keys=keys),
            imports=_COPY_KERNELS,
        ),
        Way(
            "shm",
            connector_ends.shm_receiver,
            connector_ends.shm_sender,
            source=shared_memory,
            imports=_COPY_KERNELS,
        ),
        Way(
            "rdma_python",
            connector_ends.free_rdma_receiver,
            connector_ends.free_rdma_sender,
            target=shared_memory,
            imports=_COPY_KERNELS,
            is_checked=False,
        ),
    ]
    for count in LANES:
        found += [
            Way(
                f"zmq_{count}_lanes",
                partial(connector_ends.ConnectorReceiver, kv_lanes=count),
                partial(connector_ends.ConnectorSender, kv_lanes=count),
                imports=_COPY_KERNELS,
            ),
            Way(
                f"shm_{count}_lanes",
                partial(connector_ends.shm_receiver, kv_lanes=count),
                partial(connector_ends.shm_sender, kv_lanes=count),
                source=shared_memory,
                imports=_COPY_KERNELS,
            ),
        ]
    missing = {"rdma_over_direct": "needs RDMA devices: make test-rdma"}
    reason = mooncake_tcp.why_missing()
    if reason is None:
        ends = mooncake_tcp.MooncakeReceiver, mooncake_tcp.MooncakeSender
        found.append(Way("mooncake_tcp", *ends))
    else:
        missing["mooncake_tcp"] = reason
    return found, missing


def measure(
    found: list[Way], moved: Workload, num_rounds: int
) -> tuple[dict[str, Figures], list[float]]:
    """Return figures by way, and the seconds of each memcpy. One earlier round is not counted."""
    source, target = private_memory(moved, 0).pool, private_memory(moved, 1).pool
    copies_s = []
    figures = {way.name: Figures({pattern: [] for pattern in way.patterns}) for way in found}
    pairs: list[Pair] = []
    try:
        for way in found:
            pairs.append(Pair(way, moved))
        for index in range(num_rounds + 1):
            copies_s.append(plain.memcpy_s(source, target))
            for pair in pairs:
                for pattern in pair.way.patterns:
                    move = pair.move(pattern)
                    if index == 0:
                        pair.check(pattern)
                    else:
                        figures[pair.way.name].moves[pattern].append(move)
        for pair in pairs:
            figures[pair.way.name].memory_bytes = pair.memory_bytes()
    finally:
        for pair in pairs:
            pair.close()
    return figures, copies_s[1:]


def summary(
    figures: dict[str, Figures], copies_s: list[float], moved: Workload, missing: dict[str, str]
) -> dict[str, Any]:
    """Return the figures of one size of blocks: None for what was not measured."""
    memcpy = MOVED_BYTES / _GB / statistics.median(copies_s)
    result: dict[str, Any] = {
        "raw_socket": round(figures["raw_socket"].speed("adjacent"), 3),
        "memcpy": round(memcpy, 3),
    }
    for name in ("mooncake_tcp", *CONNECTORS):
        result[name] = (
            {pattern: round(figures[name].speed(pattern), 3) for pattern in PATTERNS}
            if name in figures
            else None
        )
    result["rdma_over_direct"] = None
    result |= _ratios(result)
    connectors = [name for name in CONNECTORS if name in figures]
    result["memory_beyond_pools_mib"] = {
        name: [round(count / (1 << 20), 1) for count in figures[name].memory_bytes]
        for name in connectors
    }
    result["cpu_s_per_gb"] = {
        name: [end["all"] for end in one.cpu(_GB / MOVED_BYTES)] for name, one in figures.items()
    }
    result["cpu_us_per_block"] = {
        name: dict(
            zip(("sender", "receiver"), figures[name].cpu(1e6 / moved.num_pairs), strict=True)
        )
        for name in connectors
    }
    result["not_measured"] = missing
    return result


def _ratios(result: dict[str, Any]) -> dict[str, float | None]:
    def ratio(over: tuple[str, ...], under: tuple[str, ...]) -> float | None:
        values = []
        for path in (over, under):
            value: Any = result
            for key in path:
                value = None if value is None else value[key]
            values.append(value)
        return None if None in values else round(values[0] / values[1], 3)

    raw, scattered = ("raw_socket",), ("mooncake_tcp", "scattered")
    return {
        "zmq_adjacent_over_raw_socket": ratio(("zmq", "adjacent"), raw),
        "zmq_scattered_over_raw_socket": ratio(("zmq", "scattered"), raw),
        "zmq_over_mooncake_tcp_scattered": ratio(("zmq", "scattered"), scattered),
        "shm_adjacent_over_memcpy": ratio(("shm", "adjacent"), ("memcpy",)),
        "shm_scattered_over_memcpy": ratio(("shm", "scattered"), ("memcpy",)),
    }


def table(result: dict[str, Any]) -> str:
    """Return the same as a readable table."""
    lines = [f"{'GB/s':22}{'adjacent':>10}{'scattered':>10}"]
    for name in ("raw_socket", "memcpy", "mooncake_tcp", *CONNECTORS):
        value = result[name]
        if value is None:
            lines.append(f"{name:22}{'-':>10}{'-':>10}")
        elif isinstance(value, dict):
            lines.append(f"{name:22}" + "".join(f"{value[one]:10.2f}" for one in PATTERNS))
        else:
            lines.append(f"{name:22}{value:10.2f}")
    lines.append("")
    lines += [
        f"{key:34}{'-' if value is None else format(value, '.2f'):>8}"
        for key, value in result.items()
        if "_over_" in key
    ]
    lines.append("")
    lines += [
        f"{name}: {sent:g} MiB beyond the pool on the sender, {received:g} MiB on the receiver"
        for name, (sent, received) in result["memory_beyond_pools_mib"].items()
    ]
    for name, ends in result["cpu_us_per_block"].items():
        for end, spans in ends.items():
            threads = ", ".join(f"{thread} {span:g}" for thread, span in spans.items())
            lines.append(f"{name}, {end}: CPU microseconds per block: {threads}")
    lines += [f"{name} was not measured: {why}" for name, why in result["not_measured"].items()]
    return "\n".join(lines)


def push_table(push: dict[str, dict[str, float]]) -> str:
    """Return the lines for a reader of what a push costs its caller."""
    return "\n".join(
        f"push of {count:>6} blocks: {one['push_us_p50']:6.1f} us, p99 {one['push_us_p99']:6.1f} us"
        for count, one in push.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfer",
        description="Speed of KV transfer between two processes of this machine.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds (default: 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: wanted at least 1")
    found, missing = ways()
    push = push_calls.measure()
    results = {}
    for piece_kib in PIECE_KIB:
        moved = workload(piece_kib)
        measured = measure(found, moved, arguments.rounds)
        results[piece_kib] = summary(*measured, moved, missing)
        print(f"keys and values of {piece_kib} KiB each\n\n{table(results[piece_kib])}\n")
    print(push_table(push))
    if arguments.json:
        print(json.dumps({**results[64], "push": push, "piece_kib": results}))


if __name__ == "__main__":
    main()
