"""What nodes that start are doing, out of their logs."""

from __future__ import annotations

from engine.runner.start.compile_progress import PROGRESS
from pdserve.local_cluster.messages import compiled_kernels, last_words


def test_a_warm_start_has_no_kernels() -> None:
    assert compiled_kernels([]) == ""
    assert compiled_kernels([["loading"], []]) == ""


def test_the_last_counts_of_all_nodes_are_added() -> None:
    first = [PROGRESS % (3, 98), PROGRESS % (9, 98), "warming up"]
    assert compiled_kernels([first, []]) == "9 of about 98 compiled, once on this machine"
    assert compiled_kernels([first, [PROGRESS % (20, 98)]]).startswith("29 of about 98 ")
    assert compiled_kernels([first, [PROGRESS % (95, 98)]]).startswith("98 of about 98 ")


def test_a_log_ends_with_a_line_without_its_time() -> None:
    assert last_words([]) == ""
    assert last_words(["a", "2026-01-02 03:04:05,678 INFO pdserve: loading"]) == (
        "INFO pdserve: loading"
    )
    assert len(last_words(["x" * 1000])) == 100
