"""From a configuration to a runner that is ready to execute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import CheckpointError, ConfigError
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import known_ids
from common.kv.token_budget import num_speculative_tokens
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.runner.back_end import ModelFiles
from engine.runner.grammars.masks import GrammarMasks
from engine.runner.mtp.mtp_weights import read_mtp_weights
from engine.runner.start.choose import choose_back_end
from engine.runner.weights.checkpoint import Checkpoint, file_with_weights
from engine.runner.weights.derived.quantised_source import WIDE_FORMATS, QuantisedSource
from engine.runner.weights.derived.rotary_order import in_rotary_order
from engine.runner.weights.random_weights import RandomWeights
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec, read_eos_token_ids
from engine.runner.weights.tensor_source import TensorSource
from grammars.compiler import GrammarCompiler
from grammars.trying.trial import NODE_LIMITS
from grammars.trying.trials import GrammarTrials

if TYPE_CHECKING:
    from engine.runner.cache.contract import HostMemory
    from engine.runner.memory_meter import MemoryMeter
    from engine.runner.model_runner import ModelRunner

_logger = logging.getLogger("pdserve.engine")

_NO_SPECULATION = SpeculationConfig()


def checked_checkpoint(model: ModelConfig) -> tuple[DecoderSpec, frozenset[int], TensorSource]:
    """Return what the folder `model.model` describes, its end tokens, and its weights, unread.

    With the load format `random` the folder's weights are not looked at. Raises `CheckpointError`
    about the folder, and `ConfigError` for a `max_model_len` that does
    not fit it.
    """
    folder = Path(model.model)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder: wanted one with config.json and weights")
    spec = read_decoder_spec(folder)
    eos_token_ids = known_ids(read_eos_token_ids(folder), spec.vocab_size)
    checkpoint: TensorSource
    if model.load_format == "random":
        checkpoint = in_rotary_order(RandomWeights(spec), spec)
    else:
        checkpoint = Checkpoint(folder, spec)
    if model.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len is {model.max_model_len}: wanted at most {spec.max_position}, "
            "the model's longest context"
        )
    return spec, eos_token_ids, checkpoint


def load_model_runner(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    speculation: SpeculationConfig = _NO_SPECULATION,
    host_space: int = 0,
    max_chunk_tokens: int | None = None,
    host_memory: HostMemory | None = None,
    host_space_memory: HostMemory | None = None,
    meter: MemoryMeter | None = None,
    packed_folder: Path | None = None,
    on_imported: Callable[[], object] = lambda: None,
) -> ModelRunner:
    """Load `model.model`, a Hugging Face folder, and allocate its KV cache.

    `host_space` bytes of host memory hold swapped blocks and prefixes; `host_space_memory`
    allocates them (None: private memory). No step has more than
    `max_chunk_tokens` tokens (None: `engine.max_num_batched_tokens`). With the speculative method
    mtp the drafting layer is read too, from its own file or from the checkpoint. `host_memory`
    allocates the memory behind `kv_bytes` (None: private memory). Unless `engine.kv_cache_memory`
    is set, the largest step is computed once, and the cache takes what that leaves of the node's
    share, which `meter` measures (None: the back end's). Below `packed_folder` are the
    weights for the CPU kernels, one copy for all nodes of the machine (None: private memory).
    `on_imported` is called when Paddle is imported where it is needed, because Paddle installs
    signal handlers.

    Raises `CheckpointError`, before any weight is read, when the folder is missing, broken or
    unsupported, before kernels are compiled, when weights cannot be written below `packed_folder`,
    and `ConfigError` when a setting does not fit the model or the machine.
    """
    folder = Path(model.model)
    spec, eos_token_ids, checkpoint = checked_checkpoint(model)
    if model.load_format == "random":
        _warn_of_random_weights(folder)
    elif isinstance(checkpoint, Checkpoint) and checkpoint.quantization:
        _logger.info(
            "weights: stored in %s; activations as activation_dtype says", checkpoint.quantization
        )
    mtp = None
    if speculation.speculative_method == "mtp":
        mtp = read_mtp_weights(speculation.speculative_model, folder, checkpoint, spec)
    files = ModelFiles(spec, _quantised(checkpoint, spec, model.quantization), eos_token_ids, mtp)
    back_end = choose_back_end(model, engine, files)
    back_end.prepare(engine.num_threads, files, packed_folder)
    on_imported()
    # Imported late: a wrong path, file or setting is reported before kernels are compiled.
    from engine.runner.start.assemble import NodeShare, assemble_runner

    num_drafts = num_speculative_tokens(
        speculation.speculative_method, speculation.num_speculative_tokens
    )
    # Loaded before the largest step is measured: the plan includes the memory of its tables.
    grammars = _masks(folder, spec.vocab_size, eos_token_ids, proposes=num_drafts > 0)
    share = NodeShare(
        num_drafts=num_drafts,
        max_chunk_tokens=max_chunk_tokens or engine.max_num_batched_tokens,
        host_space=host_space,
        host_memory=host_memory,
        host_space_memory=host_space_memory,
        packed_folder=packed_folder,
        meter=meter,
    )
    runner = assemble_runner(model, engine, files, back_end, share)
    runner.grammars = grammars
    return runner


def _warn_of_random_weights(folder: Path) -> None:
    ignored = file_with_weights(folder)
    _logger.warning(
        "weights: random, of the shape that %s says: answers mean nothing%s",
        folder / "config.json",
        f"; load_format random ignores {ignored}" if ignored else "",
    )


def _masks(
    folder: Path, vocab_size: int, eos_token_ids: frozenset[int], *, proposes: bool
) -> GrammarMasks | None:
    """Return the masks of the model's tokenizer; None where grammars cannot be followed."""
    from engine.runner.memory_meter import return_freed_memory

    try:
        files = KeptFiles()
        trials = GrammarTrials(folder, folder.name, vocab_size, eos_token_ids, NODE_LIMITS, files)
        grammars = GrammarCompiler.load(folder, vocab_size, eos_token_ids, trials.weigh, files)
    except CheckpointError as error:  # a tokenizer may have more ids than the model
        _logger.warning("answers under grammars are refused: %s", error)
        return None
    if grammars is None:
        return None
    return_freed_memory()  # reading a tokenizer takes about twice what is kept of it
    return GrammarMasks(grammars, vocab_size, eos_token_ids, proposes=proposes)


def _quantised(checkpoint: TensorSource, spec: DecoderSpec, quantization: str) -> TensorSource:
    """Return the weights as they will be computed with."""
    if quantization == "none":
        return checkpoint
    for name in expected_shapes(spec):
        stored, _ = checkpoint.format_and_shape(name)
        if stored not in WIDE_FORMATS:
            raise ConfigError(
                f"quantization is {quantization}, but {name} is {stored}: wanted none, or weights "
                f"in {', '.join(WIDE_FORMATS)}"
            )
    return QuantisedSource(checkpoint, quantization.upper())
