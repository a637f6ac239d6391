"""The back end `paddle`: plain operators on any device that Paddle has; the reference in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.kv.memory_plan import DeviceMemory
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.back_end import LoadedDecoder, ModelFiles, ModelToLoad
from engine.runner.cache.contract import Cache, HostMemory
from engine.runner.cache.kv_cache import KVCache
from engine.runner.memory_meter import SHARE_OF_ITS_OWN, HostMeter, MemoryMeter
from engine.runner.paddle_import import has_gpu, import_paddle, paddle, set_num_threads
from engine.runner.weights.arithmetic import Arithmetic, stored_formats


class PaddleBackEnd:
    """A `back_end.BackEnd`. Its modules that need Paddle are imported when a model is loaded."""

    name = "paddle"
    is_measured_alone = False
    most_profiled_rows: int | None = None
    has_context_buffers = True

    @property
    def device(self) -> str:
        return "GPU, by Paddle" if has_gpu() else ""

    @property
    def is_on_host(self) -> bool:
        return not has_gpu()

    def check(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Raise `ConfigError` for a dtype that the device lacks, and for int8 activations."""
        if not has_gpu() and model.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"dtype is {model.dtype}: a CPU computes in float32; wanted auto or float32"
            )
        if model.activation_dtype == "int8":
            raise ConfigError(
                "activation_dtype is int8: wanted the CPU kernels, attention_backend numba; "
                "here: paddle"
            )

    def why_not(self, files: ModelFiles) -> str:
        return ""

    def prepare(self, num_threads: int, files: ModelFiles, packed_folder: Path | None) -> None:
        import_paddle()
        set_num_threads(num_threads)
        paddle.set_device("gpu" if has_gpu() else "cpu")

    def meter(self) -> MemoryMeter:
        return PaddleMeter(paddle.device.cuda) if has_gpu() else HostMeter()

    def arithmetic(self, model: ModelConfig, files: ModelFiles) -> Arithmetic:
        computed = "float32"
        if has_gpu():
            computed = "bfloat16" if model.dtype == "auto" else model.dtype
        return Arithmetic(computed, self.name, stored_formats(files.spec, files.weights))

    def new_cache(
        self, layout: KVLayout, memory_bytes: int, host_memory: HostMemory | None
    ) -> Cache:
        return KVCache(layout, memory_bytes, host_memory=host_memory)

    def load(self, model: ModelToLoad) -> LoadedDecoder:
        from engine.runner.paddle.attention import PaddleAttention
        from engine.runner.paddle.decoder import PaddleDecoder
        from engine.runner.paddle.mtp import PaddleMtp

        files, cache, dtype = model.files, model.cache, model.arithmetic.dtype
        assert isinstance(cache, KVCache)
        attention = PaddleAttention(files.spec, cache, dtype)
        decoder = PaddleDecoder(files.spec, files.weights, cache, model.max_len, attention, dtype)
        mtp = None
        if files.mtp is not None:
            mtp = PaddleMtp(files.mtp, decoder, decoder.num_layers)
        return LoadedDecoder(decoder=decoder, mtp=mtp)


class PaddleMeter:
    """A `memory_meter.MemoryMeter` of the current GPU. `cuda` is `paddle.device.cuda`.

    What the driver takes for itself is not counted, so a share of the GPU must leave room for it.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def memory(self) -> DeviceMemory:
        total_bytes = int(self._cuda.get_device_properties().total_memory)
        return DeviceMemory(total_bytes, "the GPU's memory", SHARE_OF_ITS_OWN)

    def reset_peak(self) -> None:
        # Loading converts weights: without this, memory that only loading used would count.
        self._cuda.synchronize()
        self._cuda.empty_cache()
        self._cuda.reset_max_memory_reserved()

    def peak_bytes(self, shared_bytes: int = 0) -> int:
        # Reserved, not allocated: memory that the allocator holds between tensors is gone as well.
        self._cuda.synchronize()
        return int(self._cuda.max_memory_reserved())
