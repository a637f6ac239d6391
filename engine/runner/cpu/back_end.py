"""The back end `numba`: kernels of this project on the CPU, in float32 or with int8 activations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.back_end import LoadedDecoder, ModelFiles, ModelToLoad
from engine.runner.cache.contract import Cache, HostMemory
from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu.library_pages import release_pages
from engine.runner.kernels.vector_ir import LANES
from engine.runner.memory_meter import HostMeter
from engine.runner.paddle_import import set_num_threads
from engine.runner.weights.arithmetic import Arithmetic, stored_formats

if TYPE_CHECKING:
    from engine.runner.cpu.mtp import NumbaMtp


class CpuBackEnd:
    """A `back_end.BackEnd`."""

    name = "numba"
    is_measured_alone = True
    most_profiled_rows: int | None = 64
    has_context_buffers = False
    is_on_host = True
    device = ""

    def check(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Raise `ConfigError` for a dtype other than float32."""
        if model.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"dtype is {model.dtype}: a CPU computes in float32; wanted auto or float32"
            )

    def why_not(self, files: ModelFiles) -> str:
        spec, experts = files.spec, files.spec.experts
        sizes = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "head_dim": spec.head_dim,
        }
        if experts is not None:
            # Those of a shared MLP are a multiple of the experts'.
            sizes["moe_intermediate_size"] = experts.inner_size
        for name, size in sizes.items():
            if size % LANES:
                return f"{name} is {size}: the CPU kernels require a multiple of {LANES}"
        return ""

    def prepare(self, num_threads: int, files: ModelFiles, packed_folder: Path | None) -> None:
        from engine.runner.cpu.common_kernels import compile_common_kernels
        from engine.runner.cpu.packed_weights import SharedWeights, decoder_plans

        set_num_threads(num_threads)
        if packed_folder is not None:  # A full disk is told before minutes of compiling.
            SharedWeights(files.weights, decoder_plans(files.spec), packed_folder).write()
        compile_common_kernels(has_experts=files.spec.experts is not None)
        release_pages("libllvmlite.so")  # computing does not need LLVM

    def meter(self) -> HostMeter:
        return HostMeter()

    def arithmetic(self, model: ModelConfig, files: ModelFiles) -> Arithmetic:
        """Return the arithmetic, which names the order of additions: that of pieces of keys."""
        from engine.runner.cpu.integer_products import products_in_integers
        from engine.runner.kernels.attention_plan import PIECE_KEYS

        in_integers = products_in_integers(model.activation_dtype, files)
        formats = stored_formats(files.spec, files.weights)
        return Arithmetic("float32", f"numba, {PIECE_KEYS} keys", formats, in_integers)

    def new_cache(
        self, layout: KVLayout, memory_bytes: int, host_memory: HostMemory | None
    ) -> Cache:
        return KVCache(layout, memory_bytes, is_mirrored=False, host_memory=host_memory)

    def load(self, model: ModelToLoad) -> LoadedDecoder:
        from engine.runner.cpu.compile_once import compile_once
        from engine.runner.cpu.decoder import NumbaDecoder
        from engine.runner.cpu.mtp import NumbaMtp

        files, cache, arithmetic = model.files, model.cache, model.arithmetic
        assert isinstance(cache, KVCache)
        mtp: NumbaMtp | None = None
        formats, has_drafts = ", ".join(arithmetic.formats), files.mtp is not None
        with compile_once(
            f"products of {formats}, int8: {arithmetic.with_bytes}, drafts: {has_drafts}"
        ):
            decoder = NumbaDecoder(
                files.spec, files.weights, cache, model.max_len, model.shape,
                with_bytes=arithmetic.with_bytes, packed_folder=model.packed_folder,
            )  # fmt: skip
            if files.mtp is not None:
                mtp = NumbaMtp(files.mtp, decoder, cache, decoder.num_layers, model.packed_folder)

        def use_cache(moved: Cache) -> None:
            assert isinstance(moved, KVCache)
            for part in (decoder, mtp):
                if part is not None:
                    part.use_cache(moved)

        return LoadedDecoder(
            decoder=decoder,
            mtp=mtp,
            step_buffer_bytes=decoder.step_buffers.num_bytes,
            shared_bytes=decoder.shared_bytes + (0 if mtp is None else mtp.shared_bytes),
            take_buffers=decoder.step_buffers.take,
            release_buffers=decoder.step_buffers.release,
            use_cache=use_cache,
        )
