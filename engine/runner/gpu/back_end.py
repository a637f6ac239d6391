"""The back end `triton`: this project's kernels on an NVIDIA GPU, with activations in bfloat16."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.kv.memory_plan import DeviceMemory
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.back_end import LoadedDecoder, ModelFiles, ModelToLoad
from engine.runner.cache.contract import Cache, HostMemory
from engine.runner.gpu.cuda_driver import LEAST_CAPABILITY, capability_of, load_driver
from engine.runner.memory_meter import SHARE_OF_ITS_OWN
from engine.runner.paddle_import import set_num_threads
from engine.runner.weights.arithmetic import Arithmetic, stored_formats

if TYPE_CHECKING:
    from engine.runner.gpu.card import Card
    from engine.runner.gpu.launcher import BindableKernel, KernelSpec

    MakeKernel = Callable[[KernelSpec], BindableKernel]

_logger = logging.getLogger("pdserve.engine")

_BLOCK_SIZES = (16, 32, 64)
_HEAD_SIZES = (16, 32, 64, 128, 256)
_LEAST_HEAD_OF_BYTES = 32
"""Least head_dim of a cache in int8: a matrix instruction takes 16 inputs, and a head is halved."""
_PROGRAMS_EACH = 3
"""Programs of a decoding step's attention for each multiprocessor."""
_CONTEXT_BYTES = 600 << 20
"""Bytes that the driver takes for a context and for loaded kernels, beside allocations."""


def has_card() -> bool:
    """Return whether Triton is installed and the driver shows a card that its kernels run on.

    Triton is not imported to find out, which would take a node on CPUs time and memory.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        driver = load_driver()
    except ConfigError:
        return False
    return capability_of(driver, 0) >= LEAST_CAPABILITY


class GpuMeter:
    """A `memory_meter.MemoryMeter` of the memory that this process has allocated on its card."""

    def __init__(self, card: Card) -> None:
        self._device = card.device

    def memory(self) -> DeviceMemory:
        properties = self._device.properties
        return DeviceMemory(properties.memory_bytes, "the GPU's memory", SHARE_OF_ITS_OWN)

    def reset_peak(self) -> None:
        self._device.most_allocated_bytes = self._device.allocated_bytes

    def peak_bytes(self, shared_bytes: int = 0) -> int:
        return self._device.most_allocated_bytes + _CONTEXT_BYTES


class GpuBackEnd:
    """A `back_end.BackEnd`. The card is opened when it is first needed."""

    name = "triton"
    is_measured_alone = False
    most_profiled_rows: int | None = None
    has_context_buffers = False
    is_on_host = False

    def __init__(self, ordinal: int = 0, open_card: Callable[[int], Card] | None = None) -> None:
        """Take the card's number, and the function that opens it (None: by the driver)."""
        self._ordinal, self._open_card = ordinal, open_card
        self._opened: Card | None = None

    @property
    def card(self) -> Card:
        """The card; `ConfigError` where there is none that can be used."""
        if self._opened is None:
            from engine.runner.gpu.card import open_card

            self._opened = (self._open_card or open_card)(self._ordinal)
        return self._opened

    @property
    def device(self) -> str:
        return f"{self.card.device.properties.name}, GPU {self._ordinal}"

    def check(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Raise `ConfigError` for a setting that the kernels lack, and where there is no card."""
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("attention_backend is triton: wanted pip install '.[gpu]'")
        for name, value, wanted in (
            ("dtype", model.dtype, ("auto", "bfloat16")),
            ("activation_dtype", model.activation_dtype, ("auto",)),
            ("kv_cache_dtype", engine.kv_cache_dtype, ("auto", "bfloat16", "int8")),
            ("block_size", engine.block_size, _BLOCK_SIZES),
        ):
            if value not in wanted:
                allowed = ", ".join(map(str, wanted))
                raise ConfigError(
                    f"{name} is {value}: attention_backend triton takes {allowed}; wanted one of "
                    "these, or attention_backend numba"
                )
        _ = self.card

    def why_not(self, files: ModelFiles) -> str:
        spec = files.spec
        if files.mtp is not None:
            return (
                "speculative_method is mtp, which has no kernels on a GPU; wanted ngram, suffix, "
                "grammar or none there"
            )
        if spec.has_output_norms:
            return "the model has norms after attention and MLP, for which there are no GPU kernels"
        if spec.embedding_scale != 1.0:
            return "embeddings are scaled, for which there are no GPU kernels"
        if spec.has_mlp_bias:
            return "the model has biases in its MLP"
        if spec.head_dim not in _HEAD_SIZES:
            return f"head_dim is {spec.head_dim}: the GPU kernels take {_HEAD_SIZES}"
        sizes = {name: getattr(spec, name) for name in ("hidden_size", "intermediate_size")}
        if spec.experts is not None:
            sizes |= {name: getattr(spec.experts, name) for name in ("inner_size", "shared_size")}
        for name, size in sizes.items():
            if size % 16:
                return f"{name} is {size}: the GPU kernels take multiples of 16"
        return ""

    def prepare(self, num_threads: int, files: ModelFiles, packed_folder: Path | None) -> None:
        set_num_threads(num_threads)  # for draws on the host

    def meter(self) -> GpuMeter:
        return GpuMeter(self.card)

    def arithmetic(self, model: ModelConfig, files: ModelFiles) -> Arithmetic:
        """Return the arithmetic: a card's matrix instructions add in an order of their own."""
        from engine.runner.gpu.launches import AttentionShape
        from engine.runner.gpu.weight_plan import orders_of_sums

        capability = self.card.device.properties.capability
        operators = f"triton, compute capability {capability / 10}, {AttentionShape().piece} keys"
        return Arithmetic(
            "bfloat16", operators, stored_formats(files.spec, files.weights),
            orders=orders_of_sums(files.spec, files.weights),
        )  # fmt: skip

    def new_cache(
        self, layout: KVLayout, memory_bytes: int, host_memory: HostMemory | None
    ) -> Cache:
        """Return a cache on the card; `ConfigError` for heads that its type cannot have.

        It needs no `host_memory`: connectors have a ring there.
        """
        from engine.runner.gpu.cache.pool import GpuCache

        if layout.dtype == "int8" and layout.head_dim < _LEAST_HEAD_OF_BYTES:
            raise ConfigError(
                f"kv_cache_dtype is int8 and head_dim is {layout.head_dim}: attention_backend "
                f"triton takes heads of {_LEAST_HEAD_OF_BYTES} and more, or kv_cache_dtype auto"
            )
        card = self.card
        return GpuCache(card.device, card.kernel, card.stream, layout, memory_bytes)

    def load(self, model: ModelToLoad) -> LoadedDecoder:
        """Send the weights to the card and record the graphs; `packed_folder` is not used.

        Raises `ConfigError` where they do not fit.
        """
        with self.card.device.room_for("the model with the buffers of its steps"):
            return self._load(model)

    def _load(self, model: ModelToLoad) -> LoadedDecoder:
        from engine.runner.gpu.cache.pool import GpuCache
        from engine.runner.gpu.card import KernelList
        from engine.runner.gpu.decoder import GpuDecoder
        from engine.runner.gpu.drawing.card_draw import CardDraw
        from engine.runner.gpu.launches import AttentionShape, KVPool, Launches
        from engine.runner.gpu.load_weights import load_weights
        from engine.runner.gpu.tiles import chunk_rows
        from engine.runner.gpu.weight_plan import refusals

        files, cache, shape, max_len = model.files, model.cache, model.shape, model.max_len
        assert isinstance(cache, GpuCache)
        card, begun_s = self.card, time.monotonic()
        weights = load_weights(card.device, files.weights, files.spec, max_len, cache.layout.dtype)
        loaded_s = time.monotonic()
        if why := refusals(files.spec, files.weights):
            _logger.warning("quantised weights are computed in bfloat16: %s", why)
        multiprocessors = card.device.properties.num_multiprocessors
        attention = AttentionShape(
            programs=_PROGRAMS_EACH * multiprocessors,
            few_programs=multiprocessors,
            tile_keys=cache.layout.block_size,
            chunk_rows=chunk_rows(
                files.spec.head_dim, cache.layout.block_size, card.device.properties.shared_bytes,
                has_scales=cache.pool.has_scales,
            ),
        )  # fmt: skip
        needed = KernelList()
        make_kernel: MakeKernel = needed.kernel

        def make_launches(pool: KVPool) -> Launches:
            return Launches(
                make_kernel, card.device.properties, files.spec, weights, pool, attention
            )

        held_before = card.device.allocated_bytes
        decoder = GpuDecoder(
            card.device, make_launches, cache.pool, files.spec, shape, max_len, card.stream
        )
        row_draw = CardDraw(card.device, decoder)
        step_buffer_bytes = card.device.allocated_bytes - held_before
        decoder.bind_all()
        row_draw.bind_all()
        for spec in cache.card_pool.kernel_specs:
            needed.kernel(spec)
        card.compile(needed.specs)
        make_kernel = card.kernel
        decoder.use_pool(cache.pool)
        decoder.steps.record_graphs()
        _logger.info(
            "%s: weights were sent in %.1f s, kernels and graphs made in %.1f s",
            card.device.properties.name, loaded_s - begun_s, time.monotonic() - loaded_s,
        )  # fmt: skip

        def use_cache(moved: Cache) -> None:
            assert isinstance(moved, GpuCache)
            decoder.use_pool(moved.pool)
            decoder.steps.record_graphs()

        return LoadedDecoder(
            decoder=decoder,
            row_draw=row_draw,
            decoding_steps=row_draw,
            step_buffer_bytes=step_buffer_bytes,
            use_cache=use_cache,
        )
