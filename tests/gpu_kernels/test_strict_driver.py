"""A node and every stage of `on_card`, on a driver that refuses what NVIDIA's would."""

from __future__ import annotations

import ast
import ctypes
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip
from tests.gpu_kernels.strict_library import (  # isort: skip
    HEADER,
    StrictLibrary,
    compiled_blank,
    declared,
    device_on,
    why_wrong,
)

import numpy as np
import pytest
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from common.errors import ConfigError
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.step.step_batch import batch_of
from engine.runner.gpu import card, cuda_driver, shareable, tensor_map
from engine.runner.gpu.cache.pool import GpuCache
from engine.runner.gpu.card import open_card
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.model_runner import ModelRunner
from tests.gpu.measuring import Card
from tests.gpu.stages import STAGES
from tests.gpu.stages.model import Findings, Model
from tests.gpu_kernels.small_cache import LAYOUT, NUM_BLOCKS
from tests.support.models.running import scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

STEPS = (
    "bits",
    "ceilings",
    "experts",
    "experts_step",
    "host",
    "launch_cost",
    "prefill",
    "products",
    "step",
)
"""Stages without those that look for the fastest of many."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictLibrary]:
    """The driver of every card that is opened; nothing that it refuses was done."""
    found = StrictLibrary()
    monkeypatch.setattr(KernelSpec, "compile", compiled_blank)
    monkeypatch.setattr(card, "compile_together", lambda specs, capability: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: found)
    yield found
    assert found.faults == []


def elsewhere(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a thread that has asked the driver for nothing yet."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.parametrize(("family", "num_drafts"), [("qwen2", 0), ("qwen2", 3), ("ernie_moe", 3)])
def test_a_node_loads_on_one_thread_and_steps_and_copies_on_others(
    library: StrictLibrary, tmp_path: Path, family: str, num_drafts: int
) -> None:
    """With as many sequences as a node has by default, and a cache that is planned."""
    folder = write_checkpoint(tmp_path, CONFIGS[family])
    runner: ModelRunner = elsewhere(
        lambda: on_card(
            folder, num_drafts=num_drafts, kv_cache_memory=0, memory_fraction=0.01,
            max_num_seqs=32, max_num_batched_tokens=256, host_space=1 << 18,
        )
    )  # fmt: skip
    elsewhere(runner.warm_up)
    for tokens in (40, 1):
        batch = batch_of([scheduled(range(tokens), 0, [5, 3, 1])])
        elsewhere(partial(runner.execute, batch))
    for kind in (CopyKind.SWAP_OUT, CopyKind.SWAP_IN):
        copy = elsewhere(partial(runner.begin_copy, CacheCopy(kind, [5, 3], [0, 1])))
        while not elsewhere(copy.is_done):
            pass
    assert isinstance(runner.cache, GpuCache)
    elsewhere(runner.cache.close)
    assert {"cuGraphLaunch", "cuStreamWaitEvent", "cuMemUnmap"} <= library.called


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"kv_cache_memory": 1 << 33}, "a KV cache of 8192 MiB does not fit"),
        ({}, "the model with the buffers of its steps does not fit"),
    ],
)
def test_a_card_that_others_have_filled(
    library: StrictLibrary, one_layer: Path, settings: dict[str, Any], what: str
) -> None:
    """As a desktop does, or another program: the plan knows a card's size alone."""
    library.free_bytes = (2 << 20) + 1000
    with pytest.raises(ConfigError, match=f"{what}.* has . MiB left of 81920") as raised:
        on_card(one_layer, **settings)
    assert "out of memory" in str(raised.value)


def test_a_driver_whose_graphs_have_no_programmatic_launches(
    library: StrictLibrary, one_layer: Path
) -> None:
    library.cuda = 12020
    on_card(one_layer)
    assert "cuGraphInstantiateWithFlags" in library.called


def test_launches_are_programmatic_where_the_driver_records_them(
    library: StrictLibrary, one_layer: Path
) -> None:
    on_card(one_layer)
    assert set(library.launched) == {(6, 1)}


def test_a_connector_uses_the_cache_from_any_thread_and_all_is_given_back(
    library: StrictLibrary,
) -> None:
    opened = open_card()
    free = library.free_bytes
    cache = GpuCache(
        opened.device, opened.kernel, opened.stream, LAYOUT, NUM_BLOCKS * LAYOUT.block_bytes
    )
    pool, blocks = cache.card_pool, np.array([1, 2])
    ring = np.zeros(2 * 4 * LAYOUT.piece_bytes, np.uint8)
    descriptor = elsewhere(pool.export)
    other = elsewhere(lambda: pool.open(descriptor, pool.shared_bytes, pool.num_blocks))
    os.close(descriptor)
    elsewhere(lambda: pool.use_ring(ring))
    for begin in (
        lambda: pool.begin_sums(1, blocks),
        lambda: pool.begin_copy(
            other, 1, blocks, blocks, queue=0, is_behind_steps=True, is_summed=True
        ),
        lambda: pool.begin_copy(
            other, 1, blocks, blocks, queue=1, is_behind_steps=False, is_summed=False
        ),
        lambda: pool.begin_out(1, blocks, blocks),
        lambda: pool.begin_in(1, blocks, blocks),
    ):
        queued = elsewhere(begin)
        elsewhere(queued.wait)
    elsewhere(other.close)
    elsewhere(cache.close)
    assert library.free_bytes == free
    assert not any(size for at, size in library.memory.items() if at == ring.ctypes.data)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STEPS)
def test_a_stage_asks_the_driver_for_nothing_that_it_refuses(
    name: str, library: StrictLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "made", None)
    # What comes back is the same byte everywhere.
    for stage in ("bits", "experts"):
        monkeypatch.setattr(sys.modules[STAGES[stage].__module__], "MOST_ERROR", math.inf)
    found = Findings()
    STAGES[name](Card(), found)
    assert found


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda device: device.call("cuMemFree_v2", 1 << 40), "4 bytes: wanted 8"),
        (lambda device: device.call("cuEventQuery"), "0 arguments: wanted 1"),
        (lambda device: device.call("cuEventQuery", 7), "no handle"),
        (lambda device: device.copy(1 << 40, 1 << 40, 8, 0), "in no memory that was taken"),
        (lambda device: elsewhere(lambda: device.memory()), "no context is current"),
        (lambda device: device.capture(device.stream(), device.event().wait), "in a recording"),
        (lambda device: device.capture(0, lambda: None), "a recording of the default stream"),
    ],
)
def test_the_stand_in_refuses_what_a_driver_does(call: Callable[[Any], None], fault: str) -> None:
    library = StrictLibrary()
    with pytest.raises(AssertionError, match=fault):
        call(device_on(library))
    assert library.faults


def test_the_declarations_of_calls_are_those_of_the_header() -> None:
    found = declared()
    assert found["cuMemAlloc_v2"] == ["CUdeviceptr *", "size_t"]
    assert found["cuCtxSynchronize"] == []
    assert len(found["cuTensorMapEncodeTiled"]) == 12
    assert why_wrong("size_t", 3)
    assert not why_wrong("size_t", ctypes.c_size_t(3))
    assert why_wrong("CUdevice *", ctypes.byref(ctypes.c_uint64()))
    assert not why_wrong("const CUlaunchConfig *", None)


def calls_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each call of the driver in a file, and how many arguments it is given."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.args[0].value
            if isinstance(name, str) and re.fullmatch(r"cu[A-Z]\w+", name):
                assert not node.keywords, name
                yield name, len(node.args) - 1


def test_every_call_has_as_many_arguments_as_the_header_says() -> None:
    """Those that no test reaches too, such as those behind an error."""
    header, found = declared(), set()
    for path in sorted(Path(cuda_driver.__file__).parent.rglob("*.py")):
        for name, count in calls_in(path):
            found.add(name)
            assert count == len(header[name]), f"{path.name}: {name} of {count} arguments"
    assert len(found) > 45


def number_in_header(name: str) -> int:
    found = re.findall(rf"^[ ,]+{name}\s*=\s*(\w+)", HEADER.read_text(), re.MULTILINE)
    [number] = {int(text, 0) for text in found}
    return number


@pytest.mark.parametrize(
    ("name", "module", "own"),
    [
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", cuda_driver, "_MAX_DYNAMIC_SHARED"),
        ("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", cuda_driver,
         "_PROGRAMMATIC_LAUNCH"),
        ("CU_EVENT_DISABLE_TIMING", cuda_driver, "_EVENT_DISABLE_TIMING"),
        ("CU_STREAM_CAPTURE_MODE_THREAD_LOCAL", cuda_driver, "_CAPTURE_THREAD_LOCAL"),
        ("CU_STREAM_NON_BLOCKING", cuda_driver, "_NON_BLOCKING_STREAM"),
        ("CUDA_ERROR_OUT_OF_MEMORY", cuda_driver, "_OUT_OF_MEMORY"),
        ("CUDA_ERROR_NOT_READY", cuda_driver, "_NOT_READY"),
        ("CU_MEM_ALLOCATION_TYPE_PINNED", shareable, "_PINNED"),
        ("CU_MEM_LOCATION_TYPE_DEVICE", shareable, "_ON_DEVICE"),
        ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", shareable, "_BY_DESCRIPTOR"),
        ("CU_MEM_ACCESS_FLAGS_PROT_READWRITE", shareable, "_READ_WRITE"),
        ("CU_MEM_ALLOC_GRANULARITY_MINIMUM", shareable, "_LEAST_GRANULARITY"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_header(name: str, module: ModuleType, own: str) -> None:
    assert vars(module)[own] == number_in_header(name)


def test_numbers_of_a_cards_attributes_are_those_of_the_header() -> None:
    names = {
        "multiprocessors": "MULTIPROCESSOR_COUNT",
        "capability_major": "COMPUTE_CAPABILITY_MAJOR",
        "capability_minor": "COMPUTE_CAPABILITY_MINOR",
        "shared_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    }
    numbers = {own: number_in_header(f"CU_DEVICE_ATTRIBUTE_{name}") for own, name in names.items()}
    assert vars(cuda_driver)["_ATTRIBUTES"] == numbers


def test_numbers_of_types_are_those_that_triton_gives_the_driver() -> None:
    own = vars(tensor_map)["_DATA_TYPES"]
    kinds = {kind: own.get(kind, kind) for kind in range(16)}
    assert kinds == TMA_DTYPE_DEVICE_TO_HOST
