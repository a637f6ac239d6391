"""Which clock the code reads: the wall clock may jump, so no wait or lease may depend on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.tree import nodes, parsed

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
NAMES = {clock.rpartition(".")[2] for clock in WALL_CLOCKS}
NODE_PACKAGES = (
    *("common", "decode_node", "engine", "kv_transfer"),
    *("node", "placement", "prefill_node", "protos", "simulator"),
)
# Files have the wall clock's times, and are old after days.
NODE_READS = {"engine/prefix_disk/file_calls.py": {"time.time_ns"}}
# Time stamps for people and other systems, and the end of a certificate.
ROUTER_READS = {
    "http_serving/certificate.py": {"time.time"},
    "router/api/models.py": {"time.time"},
    "router/dispatch/dispatcher.py": {"time.time_ns"},
    "router/api/generation.py": {"time.time"},
    "router/text/chat/chat_template.py": {"datetime.now"},
}


def wall_clocks_read(package: str) -> dict[str, set[str]]:
    """Return the wall clocks that each file of a package names."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        names: set[str] = set()
        for node in nodes(parsed(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in NAMES:
                names.add(".".join(ast.unparse(node).split(".")[-2:]))
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if read := names & WALL_CLOCKS:
            found[str(path.relative_to(ROOT))] = read
    return found


@pytest.mark.covers("F70")
@pytest.mark.parametrize("package", NODE_PACKAGES)
def test_no_node_reads_the_wall_clock(package: str) -> None:
    read = wall_clocks_read(package)
    assert read == {file: names for file, names in NODE_READS.items() if file in read}


@pytest.mark.covers("F70")
def test_nodes_read_the_wall_clock_for_files_alone() -> None:
    assert wall_clocks_read("engine") == NODE_READS


@pytest.mark.covers("F70")
def test_a_router_reads_the_wall_clock_for_time_stamps_alone() -> None:
    assert wall_clocks_read("router") | wall_clocks_read("http_serving") == ROUTER_READS
