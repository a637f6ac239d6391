"""The driver's calls, recorded by a stand-in: what a step costs the host, and what errors say."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedKernel  # isort: skip

import numpy as np
import pytest

from common.errors import ConfigError
from engine.runner.cache.layers_out import LayersOut
from engine.runner.gpu import cuda_driver
from engine.runner.gpu.cache.card_pool import GpuCardPool, OpenedCache
from engine.runner.gpu.cache.copies import CardSide
from engine.runner.gpu.cache.layer_ends import LayerEnds, QueuedLayers
from engine.runner.gpu.cache.pinned import PinnedBuffers
from engine.runner.gpu.cuda_driver import Device, Driver, GpuError, Launch, Memory, load_driver
from engine.runner.gpu.kernels.gathering import gather_rows
from engine.runner.gpu.launcher import Kernel, KernelSpec
from engine.runner.gpu.launches import KVPool, Launches
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.tiles import Tile, chunk_rows, gate_up_tile, num_ranges, product_tile, suited
from engine.runner.gpu.weights import DecoderWeights, Form, LayerWeights, Matrix
from tests.gpu.decoding import Decoding
from tests.gpu.measuring import SHARED_BYTES, SpecRecorder
from tests.gpu_kernels.tiny_decoder import BLOCK, MAX_LEN, NUM_BLOCKS, SHAPE, SPEC


class RecordingLibrary:
    """Takes the place of libcuda: every call succeeds, unless `failing` names it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events: list[tuple[str, int]] = []
        """Calls with an event, and its handle."""
        self.failing: dict[str, int] = {}
        self.cuda = 12080
        self._next = 1 << 20
        self._pinned: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            self._answer(name, arguments)
            return 0

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cuDeviceGetCount":
            arguments[0]._obj.value = 1
        elif name == "cuDriverGetVersion":
            arguments[0]._obj.value = self.cuda
        elif name == "cuMemAlloc_v2":
            arguments[0]._obj.value = self._next
            self._next += -(-arguments[1].value // 256) * 256
        elif name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = {16: 132, 75: 9, 76: 0, 97: 227 << 10}[arguments[1]]
        elif name == "cuMemHostAlloc":
            self._pinned.append(ctypes.create_string_buffer(arguments[1].value))
            arguments[0]._obj.value = ctypes.addressof(self._pinned[-1])
        elif name == "cuEventCreate":
            arguments[0]._obj.value = self._next
            self._next += 1
        elif name == "cuEventRecord":
            self.events.append((name, arguments[0].value))
        elif name == "cuStreamWaitEvent":
            self.events.append((name, arguments[1].value))
        elif name == "cuGetErrorString":
            arguments[1]._obj.value = b"no memory"


class _RecordingKernel:
    """A kernel whose launches reach the library, without having been compiled."""

    def __init__(self, device: Device, spec: KernelSpec) -> None:
        self._device = device

    def bind(self, grid: tuple[int, ...], *_: Any) -> Launch:
        return Launch(
            self._device, ctypes.c_void_p(1), (1, 1, 1), 128, 0, [ctypes.c_uint64(1)],
            is_programmatic=True,
        )  # fmt: skip


@pytest.fixture
def library() -> RecordingLibrary:
    return RecordingLibrary()


@pytest.fixture
def device(library: RecordingLibrary) -> Device:
    return Device(Driver(library), 0)


def ends_on(device: Device, num_layers: int = 1) -> LayerEnds:
    ends = LayerEnds(device, 7, num_layers)
    ends.forget(NUM_BLOCKS)
    return ends


def matrix(num_outputs: int, num_inputs: int) -> Matrix:
    return Matrix(1, num_outputs, num_inputs)


def launches_on(device: Device) -> Launches:
    hidden, heads = SPEC.hidden_size, SPEC.num_heads * SPEC.head_dim
    layer = LayerWeights(
        1, matrix(SPEC.qkv_size, hidden), 1, 1, matrix(hidden, heads), 1,
        matrix(2 * SPEC.intermediate_size, hidden), matrix(hidden, SPEC.intermediate_size),
    )  # fmt: skip
    head = matrix(SPEC.vocab_size, hidden)
    weights = DecoderWeights((layer,) * SPEC.num_layers, 1, 1, head, {SPEC.rope: 1}, ())
    pool = KVPool(1, NUM_BLOCKS, BLOCK, 64)
    return Launches(
        lambda spec: _RecordingKernel(device, spec), device.properties, SPEC, weights, pool, SHAPE
    )


def decoding(device: Device) -> Decoding:
    step = Decoding(device, launches_on(device), 7, 4, MAX_LEN)
    step.set_rows(
        np.zeros(4, int), np.array([3, 5, -1, -1]), np.zeros((4, step.table_width), int)
    )  # fmt: skip
    return step


def test_a_step_and_the_one_behind_it_are_one_launch_of_a_graph_each(
    library: RecordingLibrary, device: Device
) -> None:
    """Tokens to the host, rows to the card, the graph; the host waits when all is queued."""
    step = decoding(device)
    step.begin()
    step.go_on()
    step.tokens()
    for _ in range(3):
        library.calls.clear()
        step.go_on()
        step.tokens()
        assert library.calls == [
            "cuMemcpyAsync", "cuEventRecord",
            "cuEventSynchronize", "cuMemcpyAsync", "cuEventRecord",  # the copy before the last
            "cuGraphLaunch", "cuEventSynchronize",
        ]  # fmt: skip


def test_a_captured_step_has_nine_launches_a_layer(
    library: RecordingLibrary, device: Device
) -> None:
    step = decoding(device)
    library.calls.clear()
    step.capture()
    # The list of pieces and the embedding; the head, the draw in two.
    assert library.calls.count("cuLaunchKernelEx") == 2 + 9 * SPEC.num_layers + 3
    assert library.calls[0] == "cuStreamBeginCapture_v2"
    assert "cuStreamEndCapture" in library.calls


@pytest.mark.parametrize("is_out", [True, False])
def test_a_copy_of_blocks_waits_for_every_step_that_is_queued(
    library: RecordingLibrary, device: Device, is_out: bool
) -> None:
    """A step that was begun early may still write a block that has another owner by then."""
    pool = KVPool(1, NUM_BLOCKS, BLOCK, 64)
    buffers = PinnedBuffers(device)
    side = CardSide(device, lambda spec: _RecordingKernel(device, spec), lambda: pool, 7, buffers)
    ours, theirs = np.array([3, 5]), np.array([0, 1])
    host = np.zeros((2, 4, pool.piece_bytes), np.uint8)
    library.calls.clear()
    if is_out:
        side.begin_out(0, ours, host, theirs)
    else:
        side.begin_in(0, ours, side.gather(host, theirs, ours))
    calls = [c for c in library.calls if c.startswith(("cuEventRecord", "cuStream", "cuLaunch"))]
    assert calls == ["cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuEventRecord"]


class _StreamKernel:
    """A kernel that tells on which stream it was launched."""

    def __init__(self, streams: list[int]) -> None:
        self._streams = streams

    def bind(self, grid: tuple[int, ...], *_: Any) -> Callable[[int], None]:
        return self._streams.append


def test_blocks_pass_a_ring_on_streams_of_their_own_and_no_thread_waits_in_the_driver(
    library: RecordingLibrary, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out behind the end of their layer, whatever is queued behind it; in behind all steps."""
    made = itertools.count(100)
    monkeypatch.setattr(device, "stream", lambda **_: next(made))
    pool, streams = KVPool(1 << 20, NUM_BLOCKS, BLOCK, 1024), list[int]()
    memory = Memory(1 << 20, 1 << 20, lambda: None)
    card = GpuCardPool(
        device, lambda _: _StreamKernel(streams), lambda: pool, lambda: memory, 7,
        PinnedBuffers(device), ends_on(device),
    )  # fmt: skip
    card.use_ring(np.zeros(2 * 4 * 1024, np.uint8))
    assert "cuMemHostRegister_v2" in library.calls
    blocks, slots = np.array([2, 0]), np.array([1, 3])
    for _ in range(2):  # The first ones make a buffer each.
        streams.clear()
        library.calls.clear()
        out = card.begin_out(0, blocks, slots)
        num_out = len(library.calls)
        into = card.begin_in(0, slots, blocks)
        num_begun = len(library.calls)
        for queued in (out, into):
            queued.wait()
    named = [name for name in library.calls if name != "cuCtxSetCurrent"]
    num_out, num_begun = (
        sum(name != "cuCtxSetCurrent" for name in library.calls[:end])
        for end in (num_out, num_begun)
    )
    assert named[:num_out] == ["cuStreamWaitEvent", "cuEventCreate", "cuEventRecord"]
    assert named[num_out:num_begun] == [
        "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy_v2",
        "cuEventCreate", "cuEventRecord",
    ]  # fmt: skip
    assert set(named[num_begun:]) == {"cuEventQuery", "cuEventDestroy_v2"}
    assert len({*streams, 7}) == 3
    card.close()
    assert library.calls[-1] == "cuMemHostUnregister"


def test_a_chunk_is_uploaded_when_the_step_before_has_ended(
    library: RecordingLibrary, device: Device
) -> None:
    """That step may still read the buffers."""
    steps = ChunkStep(device, launches_on(device), 7, 64, 1, MAX_LEN)
    for _ in range(2):
        library.calls.clear()
        steps.run([ChunkRow([1, 2, 3], 0, [4])])
        assert library.calls.index("cuStreamSynchronize") < library.calls.index("cuMemcpyHtoD_v2")
        assert library.calls[-1] == "cuLaunchKernelEx"


def test_a_failed_launch_ends_the_recording(library: RecordingLibrary, device: Device) -> None:
    step = decoding(device)
    library.failing |= {"cuLaunchKernelEx": 2, "cuStreamEndCapture": 901}
    with pytest.raises(GpuError, match=r"cuLaunchKernelEx: no memory \(2\)"):
        step.capture()
    assert "cuStreamEndCapture" in library.calls


@pytest.mark.parametrize("is_behind_steps", [True, False])
def test_a_copy_out_of_another_cache_is_queued_and_not_waited_for(
    library: RecordingLibrary, device: Device, is_behind_steps: bool
) -> None:
    """A landing's first copy is ordered behind the steps on the card; the host waits for none."""
    pool = KVPool(1 << 20, NUM_BLOCKS, BLOCK, 1024)
    memory = Memory(1 << 20, 1 << 20, lambda: None)
    card = GpuCardPool(
        device, lambda spec: _RecordingKernel(device, spec), lambda: pool, lambda: memory,
        7, PinnedBuffers(device), ends_on(device),
    )  # fmt: skip
    source = OpenedCache(device, memory, NUM_BLOCKS, wait_for_copies=lambda: None)
    blocks = np.array([1, 2])
    for _ in range(2):  # The first one makes a stream and a buffer.
        library.calls.clear()
        queued = card.begin_copy(
            source, 0, blocks, blocks, queue=0, is_behind_steps=is_behind_steps, is_summed=True
        )
        begun = list(library.calls)
        assert queued.wait() is not None
    order = ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy_v2"]
    launched = ["cuLaunchKernelEx", "cuEventCreate", "cuEventRecord"]
    assert [name for name in begun if name != "cuCtxSetCurrent"] == (
        order * is_behind_steps + launched
    )
    ended = [name for name in library.calls[len(begun) :] if name != "cuCtxSetCurrent"]
    assert ended == ["cuEventQuery", "cuEventQuery", "cuEventDestroy_v2"]


def test_sums_are_made_behind_the_end_of_their_layer(
    library: RecordingLibrary, device: Device
) -> None:
    """Layers are told when all are queued, and no thread waits for one to be computed."""
    pool = KVPool(1 << 20, NUM_BLOCKS, BLOCK, 1024)
    memory = Memory(1 << 20, 1 << 20, lambda: None)
    ends = ends_on(device, 2)
    card = GpuCardPool(
        device, lambda spec: _RecordingKernel(device, spec), lambda: pool, lambda: memory,
        7, PinnedBuffers(device), ends,
    )  # fmt: skip
    recorded: list[list[int]] = []
    for block in (1, 2):
        told: list[int] = []
        ends.begin(np.array([block]))
        layers = LayersOut(told.append, QueuedLayers(ends).mark, most_under_way=2)
        library.calls.clear()
        library.events.clear()
        layers.on_computed(0)
        assert told == []
        layers.on_computed(1)
        assert told == [0, 1]
        assert library.calls == ["cuEventRecord", "cuEventRecord"]
        layers.finish()
        recorded.append([handle for _, handle in library.events])
    for step, blocks in ((0, [1]), (1, [2]), (1, [1, 2])):
        library.calls.clear()
        library.events.clear()
        card.begin_sums(1, np.array(blocks))
        begun = [name for name in library.calls if name != "cuCtxSetCurrent"]
        assert begun.index("cuStreamWaitEvent") < begun.index("cuLaunchKernelEx")
        assert not any("Synchronize" in name for name in library.calls)
        # Not for the step behind the one that wrote them, which may take long.
        assert library.events[0] == ("cuStreamWaitEvent", recorded[step][1])


def test_what_was_uploaded_is_there_for_any_stream(
    library: RecordingLibrary, device: Device
) -> None:
    """The copy returns as soon as it has read pageable memory, and steps' streams wait for none."""
    library.calls.clear()
    device.upload(1 << 20, b"12")
    device.upload_array(1 << 20, np.ones(2))
    assert library.calls == 2 * ["cuMemcpyHtoD_v2", "cuStreamSynchronize"]


def test_an_address_that_is_not_aligned_is_refused_before_a_launch(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card would fail in the kernel, whose wide loads are compiled for aligned ones."""
    metadata = SimpleNamespace(name="gather_rows", shared=0, num_warps=4)
    compiled = SimpleNamespace(metadata=metadata, asm={"cubin": b""})
    monkeypatch.setattr(KernelSpec, "compile", lambda spec, capability: compiled)
    types = {"source": "*bf16", "rows": "*i32", "out": "*bf16"}
    spec = KernelSpec(gather_rows, types, {"N": 8, "COLUMNS": 8, "IS_PROGRAMMATIC": False})
    for kernel in (Kernel(device, spec), InterpretedKernel(spec)):
        kernel.bind((1,), 0x1000, 0x2000, 0)
        with pytest.raises(ValueError, match="rows is at 0x2004: wanted a multiple of 16"):
            kernel.bind((1,), 0x1000, 0x2004, 0)


def test_a_card_that_triton_does_not_know(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for(spec: KernelSpec, capability: int) -> NoReturn:
        raise RuntimeError(f"Value 'sm_{capability}a' is not defined for option 'gpu-name'")

    monkeypatch.setattr(KernelSpec, "compile", compile_for)
    with pytest.raises(
        ConfigError, match=r"gather_rows does not compile for .* 9\.0, with Triton .*sm_90a"
    ):
        Kernel(device, KernelSpec(gather_rows, {}, {}))


def test_a_card_with_too_little_shared_memory_for_a_kernel(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says no more than that an argument is invalid."""
    metadata = SimpleNamespace(name="attend_chunk", shared=228 << 10, num_warps=8)
    compiled = SimpleNamespace(metadata=metadata, asm={"cubin": b""})
    monkeypatch.setattr(KernelSpec, "compile", lambda spec, capability: compiled)
    with pytest.raises(
        ConfigError, match=r"attend_chunk takes 228 KiB of shared memory, and .* 227"
    ):
        Kernel(device, KernelSpec(gather_rows, {}, {}))


def test_memory_is_freed_once(library: RecordingLibrary, device: Device) -> None:
    memory = device.allocate(100)
    memory.close()
    memory.close()
    assert library.calls.count("cuMemFree_v2") == 1


def test_a_card_that_is_not_there(library: RecordingLibrary) -> None:
    with pytest.raises(ConfigError, match="card 1: wanted 0 to 0"):
        Device(Driver(library), 1)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libnone.so.1")
    with pytest.raises(ConfigError, match="no NVIDIA driver: libnone"):
        load_driver()


def test_a_driver_that_is_too_old(
    library: RecordingLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    load_driver()
    library.cuda = 11080
    with pytest.raises(ConfigError, match=r"too old, of CUDA 11\.8: wanted 12\.0 or later"):
        load_driver()


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 64, 128, 512, 4096])
@pytest.mark.parametrize("inputs", [896, 1024, 4096, 4864, 12288])
@pytest.mark.parametrize("capability", [80, 89, 90, 103, 120])
def test_tiles_divide_the_inputs_and_fit_the_card(rows: int, inputs: int, capability: int) -> None:
    shared = SHARED_BYTES[capability]
    card = cuda_driver.DeviceProperties("a card", capability, 108, shared, 80 << 30)
    for form in Form:
        weights = Matrix(1, 8192, inputs, form)
        for width, choose in ((1, product_tile), (2, gate_up_tile)):
            tile = suited(choose(rows, 8192 // width, weights), card, width, weights)
            ranges = 1 if form is Form.BF16 else num_ranges(weights)
            assert inputs // ranges % tile.depth == 0
            assert tile.prefetch <= inputs // ranges
            size = form.bits / 8
            stages = tile.stages
            if tile.is_together:
                stages = ranges * (stages - 1)
            elif form is not Form.BF16:
                width = 1
            held = (size * width * tile.outputs + 2 * tile.rows) * tile.depth * stages
            assert held <= shared
            # Others keep operands in registers, and have fewer results a program.
            assert not tile.is_described or capability in (90, 103)
            if form is Form.BF16 and capability not in (90, 103):
                assert tile.rows * tile.outputs * width <= 2048 * tile.num_warps


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_chunks_tile_fits_the_card(head_dim: int, block_size: int) -> None:
    """The keys of a block are always added together: only rows can be fewer."""
    for has_scales in (False, True):
        rows = {
            shared: chunk_rows(head_dim, block_size, shared, has_scales=has_scales)
            for shared in SHARED_BYTES.values()
        }
        assert rows[99 << 10] >= 32
        assert rows[163 << 10] == rows[227 << 10]
        narrow = head_dim == 256 and block_size == 64 and not has_scales
        assert rows[99 << 10] * (2 if narrow else 1) == rows[227 << 10]


@pytest.mark.parametrize("inputs", [16, 48, 64, 96, 4096])
def test_whole_lines_of_weights_are_asked_for_ahead(device: Device, inputs: int) -> None:
    """The compiler refuses less than a line, which the interpreter does not ask for."""
    recorder, nothing = SpecRecorder(), cast(Any, None)
    make = Launches(recorder.kernel, device.properties, SPEC, nothing, nothing, SHAPE)
    for rows in (1, 32, 128):
        make.product(0, matrix(64, inputs), 0, rows)
        make.gate_up(0, matrix(64, inputs), 0, rows)
    for spec in recorder.specs:
        lines, rest = divmod(spec.constants["PREFETCH"], 64)
        assert rest == 0
        assert lines & (lines - 1) == 0


def test_inputs_that_no_tile_divides() -> None:
    with pytest.raises(ConfigError, match="200 inputs with weights in INT4: wanted a multiple of"):
        product_tile(1, 64, Matrix(1, 64, 200, Form.INT4))
    with pytest.raises(ConfigError, match="wanted a multiple of 16"):
        product_tile(1, 64, Matrix(1, 64, 100))


def test_programs_cover_the_result() -> None:
    assert Tile(16, 64, 64, 4, 3).programs(17, 130) == 2 * 3
