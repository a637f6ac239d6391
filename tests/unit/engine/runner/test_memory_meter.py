"""The memory of a machine, of a container with a limit, and of a GPU."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from types import SimpleNamespace

from engine.runner.memory_meter import HostMeter, return_freed_memory
from engine.runner.paddle.back_end import PaddleMeter
from tests.support.observing.control_groups import put_in_group

MIB = 1 << 20
UNLIMITED = "9223372036854771712"


def test_a_container_has_its_limit_for_itself_and_shares_a_machine(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = HostMeter(tmp_path).memory()
    assert (machine.total_bytes, machine.default_fraction) == (physical, 0.3)
    assert machine.name == "the memory of this machine"
    put_in_group(tmp_path, "0::/", {"sys/fs/cgroup/memory.max": str(64 * MIB)})
    container = HostMeter(tmp_path).memory()
    assert (container.total_bytes, container.default_fraction) == (64 * MIB, 0.9)
    assert container.name == "the memory limit of this container"
    put_in_group(tmp_path, "0::/", {"sys/fs/cgroup/memory.max": UNLIMITED})
    assert HostMeter(tmp_path).memory() == machine


def test_the_peak_of_this_process_counts_what_it_no_longer_has() -> None:
    meter = HostMeter()
    meter.reset_peak()
    before = meter.peak_bytes()
    # A mapping of its own: not from what the process has freed before.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 64 * MIB, flags=private) as taken:
        for page in range(0, 64 * MIB, mmap.PAGESIZE):
            taken[page] = 1
    assert 60 * MIB <= meter.peak_bytes() - before <= 80 * MIB
    meter.reset_peak()
    assert meter.peak_bytes() - before <= 30 * MIB


def test_pages_of_mapped_files_are_not_counted(tmp_path: Path) -> None:
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    rows = "Name:\tpython\nVmHWM:\t  900 kB\nRssAnon:\t 500 kB\nRssFile:\t 300 kB\n"
    status.write_text(rows)
    meter = HostMeter(tmp_path)
    meter.reset_peak()
    assert meter.peak_bytes() == 600 << 10
    status.write_text(rows + "RssShmem:\t 100 kB\n")  # a mapped file of a tmpfs
    assert meter.peak_bytes(200 << 10) == 500 << 10
    assert meter.peak_bytes(70 << 10) == 530 << 10  # the rest is not weights
    assert meter.peak_bytes() == 600 << 10
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


class FakeCuda:
    """`paddle.device.cuda` whose allocator held 90 MiB while weights were loaded, and 3 since."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_device_properties(self) -> SimpleNamespace:
        return SimpleNamespace(total_memory=100 * MIB)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset_max_memory_reserved(self) -> None:
        self.calls.append("reset")

    def max_memory_reserved(self) -> int:
        self.calls.append("read")
        return (3 if self.calls.count("reset") else 90) * MIB


def test_the_memory_of_a_gpu_is_what_its_allocator_held() -> None:
    cuda = FakeCuda()
    meter = PaddleMeter(cuda)
    memory = meter.memory()
    assert (memory.total_bytes, memory.default_fraction) == (100 * MIB, 0.9)
    assert memory.name == "the GPU's memory"
    meter.reset_peak()
    assert meter.peak_bytes() == 3 * MIB
    # What loading left is given back first, and the kernels of the step have ended.
    assert cuda.calls == ["synchronize", "empty_cache", "reset", "synchronize", "read"]


def test_paddle_has_what_the_meter_of_a_gpu_calls() -> None:
    from engine.runner.paddle_import import paddle

    for name in (
        "get_device_properties",
        "synchronize",
        "empty_cache",
        "reset_max_memory_reserved",
        "max_memory_reserved",
    ):
        assert callable(getattr(paddle.device.cuda, name)), name


def test_freed_memory_is_returned() -> None:
    """Small pieces that are freed stay with the process until they are returned."""
    pieces = [bytes(2000) for _ in range(20_000)]
    kept = pieces[::50]
    del pieces
    before = _resident_bytes()
    return_freed_memory()
    assert before - _resident_bytes() > 20 << 20
    assert len(kept) == 400


def _resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
