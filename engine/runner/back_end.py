"""What a back end is: all that depends on what computes a model, and nothing else does.

A back end is a folder whose module `back_end` has one class of the protocol `BackEnd`, with one
line in `start.choose`. It says what it computes in, which settings it refuses, how memory is
measured, and it loads a model: a decoder on a KV cache, and what drafts and draws beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # importing these compiles kernels, and settings are checked before
    from pathlib import Path

    from common.kv.kv_layout import KVLayout
    from common.settings.config import EngineConfig, ModelConfig
    from engine.runner.cache.contract import Cache, HostMemory
    from engine.runner.decoder import Decoder
    from engine.runner.drawing.draws import DecodingSteps, RowDraw
    from engine.runner.memory_meter import MemoryMeter
    from engine.runner.mtp.draft_step import MtpLayer
    from engine.runner.mtp.mtp_weights import MtpWeights
    from engine.runner.weights.arithmetic import Arithmetic
    from engine.runner.weights.spec.model_spec import DecoderSpec
    from engine.runner.weights.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked folder: its decoder, its weights, unread, its end tokens, and its MTP layer."""

    spec: DecoderSpec
    weights: TensorSource
    eos_token_ids: frozenset[int]
    mtp: MtpWeights | None = None

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV cache; that of an MTP layer is the last."""
        return self.spec.num_layers + (self.mtp is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How large a step can be.

    `num_tokens` rows in all, of at most `num_seqs` sequences; logits of at most `num_logits_rows`
    rows at a time. A sequence that decodes has up to `decode_rows` rows, its drafts included.
    """

    num_tokens: int
    num_seqs: int
    num_logits_rows: int
    decode_rows: int = 1


@dataclass(frozen=True, slots=True)
class ModelToLoad:
    """What a back end loads: `files`, computed in `arithmetic`, onto `cache`.

    No sequence is longer than `max_len`, no step larger than `shape`. Below `packed_folder` are
    weights in the form of the back end that nodes of this machine share (None: private memory).
    """

    files: ModelFiles
    arithmetic: Arithmetic
    cache: Cache
    max_len: int
    shape: StepShape
    packed_folder: Path | None


def _nothing() -> None:
    """Do nothing: for back ends whose framework allocates a step's memory."""


def _keep(_: Cache) -> None:
    """Do nothing: for back ends that ask the cache for its memory in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDecoder:
    """A model that a back end has loaded onto a cache.

    `row_draw` draws tokens where they are computed (None: on the host, from logits), and
    `decoding_steps` computes steps that decode from rows to tokens (None: as any other step).
    `step_buffer_bytes` is 0 where a framework allocates a step's memory; `take_buffers` takes it
    whole, as the largest step does, and `release_buffers` returns it to the system until steps
    need it. `use_cache` moves the model to the memory that its cache has now. `shared_bytes` are
    those of weights in a mapped file.
    """

    decoder: Decoder
    mtp: MtpLayer | None = None
    row_draw: RowDraw | None = None
    decoding_steps: DecodingSteps | None = None
    step_buffer_bytes: int = 0
    shared_bytes: int = 0
    take_buffers: Callable[[], None] = _nothing
    release_buffers: Callable[[], None] = _nothing
    use_cache: Callable[[Cache], None] = _keep


class BackEnd(Protocol):
    """What computes models. Making one imports, compiles and allocates nothing."""

    name: str
    """As the setting `attention_backend` calls it."""
    is_measured_alone: bool
    """Whether processes of a machine would falsify each other's measurements."""
    most_profiled_rows: int | None
    """The most rows of a layer that is computed only to measure its memory; None: all of a step."""
    has_context_buffers: bool
    """Whether a step takes more memory the longer its sequences are."""

    @property
    def device(self) -> str:
        """The accelerator that it computes on, for people; empty: the CPU."""

    @property
    def is_on_host(self) -> bool:
        """Whether it computes in the host's memory, where swapped-out blocks are too."""

    def check(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Raise `ConfigError` for settings that it cannot compute with, reading no file."""

    def why_not(self, files: ModelFiles) -> str:
        """Return why it cannot compute these files, in words; empty if it can."""

    def prepare(self, num_threads: int, files: ModelFiles, packed_folder: Path | None) -> None:
        """Import or compile what every model needs, for so many CPU threads (0: all cores).

        It takes seconds or more. Raises `ConfigError` when the machine has fewer cores, and
        `CheckpointError` before it compiles when it cannot write weights below `packed_folder`.
        """

    def meter(self) -> MemoryMeter:
        """Return what measures the memory that it computes in."""

    def arithmetic(self, model: ModelConfig, files: ModelFiles) -> Arithmetic:
        """Return what it computes these files in; `ConfigError` if it cannot as wanted."""

    def new_cache(
        self, layout: KVLayout, memory_bytes: int, host_memory: HostMemory | None
    ) -> Cache:
        """Return a cache of as many blocks as fit, all zero; `ConfigError` if fewer than two do."""

    def load(self, model: ModelToLoad) -> LoadedDecoder:
        """Read the weights; raise `CheckpointError` for broken files."""
