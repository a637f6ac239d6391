"""What the processes of a cluster may hold while they are attacked, and at the end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.memory import memory_of
from tests.support.cluster.processes import is_alive
from tests.support.observing.process_tasks import children_of

MIB = 1 << 20
MOST_GROWTH_BYTES = 512 * MIB
"""Growth of a process, or of one that it started, at the worst moment."""
MOST_KEPT_BYTES = 128 * MIB
"""Growth of a process at the end: allocators, tokenizer caches, grammars of 4 MiB, open pages."""
MOST_GRAMMARS_BYTES = 192 * MIB
"""Compiled grammars that a node keeps, beside that."""
MOST_OF_A_CHILD_BYTES = 256 * MIB
"""What a process that a router started has at the end."""
MOST_NEW_FILES = 16

ZERO_AT_THE_END = frozenset(
    {
        "pdserve_requests_in_progress",
        "pdserve_router_choices_in_progress",
        "pdserve_api_key_requests_in_progress",
        "pdserve_running_sequences",
        "pdserve_waiting_sequences",
        "pdserve_seats_used_ratio",
        "pdserve_queued_prompt_tokens",
        "pdserve_open_transfers",
        "pdserve_head_passed_sequences",
        "pdserve_kv_blocks_used_ratio",
        "pdserve_growth_blocks",
        "pdserve_swapped_blocks",
        "pdserve_kv_open_transfers",
        "pdserve_kv_open_landings",
        "pdserve_kv_quarantined_blocks",
    }
)
"""Gauges of what is held for requests."""


@dataclass(slots=True)
class Held:
    """What one process holds; `grandchildren` are those of processes that it started."""

    resident_bytes: int
    num_files: int
    children: dict[int, int] = field(default_factory=dict)
    num_grandchildren: int = 0


class Processes:
    """The processes of a cluster: none may end, nor one that lives as long as its router."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        """`folder` holds their logs."""
        self._cluster = cluster
        names = {name: folder / f"{cluster.spec.name}-{name}.log" for name in cluster.processes}
        self._logs = {name: path.open("r", errors="replace") for name, path in names.items()}
        self.pids = {name: process.pid for name, process in cluster.processes.items()}
        self._children: dict[int, str] = {}
        self.at_start = self.held()
        self.peaks = {name: one.resident_bytes for name, one in self.at_start.items()}
        self.child_peak = 0

    @property
    def are_running(self) -> bool:
        """Whether all of them run, in the lives in which they were found."""
        return all(
            process.is_running and process.pid == self.pids[name]
            for name, process in self._cluster.processes.items()
        )

    def close(self) -> None:
        """Read no log any more."""
        for log in self._logs.values():
            log.close()

    def held(self) -> dict[str, Held]:
        """Return what each process holds now."""
        held = {}
        for name, process in self._cluster.processes.items():
            process.require_running()
            pid = self.pids[name]
            one = Held(memory_of(pid), len(list(Path(f"/proc/{pid}/fd").iterdir())))
            for child in process.children():
                with contextlib.suppress(OSError, ValueError):
                    one.children[child] = memory_of(child)
                    one.num_grandchildren += len(children_of(child))
            held[name] = one
        return held

    def faults(self) -> list[str]:
        """Return what is wrong now: a process that ended, grew too much, or logged a bug."""
        found = []
        for name, process in self._cluster.processes.items():
            if not process.is_running or process.pid != self.pids[name]:
                found.append(f"{name} ended: {process.log()[-2000:]}")
        if not self.are_running:
            return found
        for name, one in self.held().items():
            self.peaks[name] = max(self.peaks[name], one.resident_bytes)
            growth = one.resident_bytes - self.at_start[name].resident_bytes
            if growth > MOST_GROWTH_BYTES:
                found.append(f"{name} grew by {growth / MIB:.0f} MiB")
            for child, size in one.children.items():
                self.child_peak = max(self.child_peak, size)
                self._children.setdefault(child, name)
                if size > MOST_GROWTH_BYTES:
                    found.append(f"a process that {name} started has {size / MIB:.0f} MiB")
        for name, log in self._logs.items():
            told, _, rest = log.read().partition("Traceback")
            if rest:
                found.append(f"{name} logged a traceback: {told[-300:]}Traceback{rest[:3000]}")
        gone = [child for child in self._children if not is_alive(child)]
        found += [f"a process that {self._children.pop(child)} started ended" for child in gone]
        return found


def closing_faults(cluster: Cluster, processes: Processes) -> list[str]:
    """Return what is still held that should not be, once all clients have gone."""
    found = []
    try:
        cluster.check_settled(timeout_s=60.0)
    except AssertionError as error:
        found.append(str(error))
    for name, text in _metrics(cluster).items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in ZERO_AT_THE_END and sample.value != 0:
                    found.append(f"{name}: {sample.name}{sample.labels} is {sample.value}")
                is_cache = sample.name == "pdserve_grammars_cached_bytes"
                if is_cache and sample.value > MOST_GRAMMARS_BYTES:
                    found.append(f"{name} keeps grammars of {sample.value / MIB:.0f} MiB")
    for name, now in processes.held().items():
        before = processes.at_start[name]
        is_node = not name.startswith("router")
        most = MOST_KEPT_BYTES + (MOST_GRAMMARS_BYTES if is_node else 0)
        kept = now.resident_bytes - before.resident_bytes
        if kept > most:
            found.append(f"{name} keeps {kept / MIB:.0f} MiB more than at its start")
        if now.num_files > before.num_files + MOST_NEW_FILES:
            found.append(f"{name} has {now.num_files} files open, and had {before.num_files}")
        if now.num_grandchildren:
            found.append(f"{name} has {now.num_grandchildren} trials of grammars running")
        for size in now.children.values():
            if size > MOST_OF_A_CHILD_BYTES:
                found.append(f"a process that {name} started keeps {size / MIB:.0f} MiB")
    return found


def _metrics(cluster: Cluster) -> dict[str, str]:
    addresses = {"router-1": cluster.url}
    for node in cluster.spec.nodes:
        addresses[node.node_id] = f"http://{cluster.record(node.node_id).metrics_address}"
    return {
        name: httpx.get(f"{url}/metrics", timeout=60.0, headers=cluster.headers).text
        for name, url in addresses.items()
    }
