"""The three phases, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from common.errors import ConfigError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from router.text.text_model import TextModel
from tools.mtp_training.batches import DRAFTS, split_held_out
from tools.mtp_training.draft_vocabulary import rank_tokens, share_inside
from tools.mtp_training.drafting import Drafter
from tools.mtp_training.first_weights import first_weights
from tools.mtp_training.generation import write_answers, write_messages
from tools.mtp_training.mtp_layer import MtpLayer, refuse_other_layers
from tools.mtp_training.target_model import MAX_SEQUENCE, TargetModel
from tools.mtp_training.training import Training, TrainingPlan
from tools.mtp_training.work_folder import Conversation, WorkFolder, write_whole

_NUM_SLOTS = 48
"""Texts decoded at a time; their KV of the demo model takes 1.1 GB."""
_COMMON = 2048
"""The number of most used tokens that take part in every step's loss; others are sampled."""
_VOCABULARY_STEP = 16
"""The engine's kernels process the head's rows in groups of this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a run; the defaults are those of the command line."""

    num_messages: int
    answer_tokens: int
    num_steps: int
    draft_vocabulary: int

    def check(self, vocab_size: int) -> None:
        """Raise `ConfigError`, naming the setting that is wrong."""
        for name in ("num_messages", "answer_tokens", "num_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: wanted at least 1")
        size = self.draft_vocabulary
        if size % _VOCABULARY_STEP or not 0 < size <= vocab_size:
            raise ConfigError(
                f"draft_vocabulary is {size}: wanted a multiple of {_VOCABULARY_STEP}, at most "
                f"{vocab_size}, the model's vocabulary"
            )


def distil(
    folder: Path, work_folder: Path, output: Path, sizes: Sizes, *, seed: int, num_threads: int
) -> None:
    """Continue a run in `work_folder` to its end and write its weights to `output`.

    Raises `CheckpointError` or `ConfigError` for a model without a layer of this kind, a work
    folder of another run, or sizes that do not fit.
    """
    spec = read_decoder_spec(folder)
    sizes.check(spec.vocab_size)
    refuse_other_layers(spec)
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: {output.parent} is not a folder")
    checkpoint = Checkpoint(folder, spec)
    settings = {
        "model": checkpoint.identity(),
        "seed": seed,
        "draft_vocabulary": sizes.draft_vocabulary,
    }
    work = WorkFolder(work_folder, settings)
    text = _write_corpus(folder, work, sizes, seed, num_threads)
    train, held_out = split_held_out(work.conversations())
    if not train or not held_out:
        raise ConfigError(
            f"{len(train)} conversations to train on and {len(held_out)} to measure on: wanted "
            "some of both; raise --answer-tokens"
        )
    embedding = checkpoint.read("model.embed_tokens.weight")
    head = embedding if spec.has_tied_embeddings else checkpoint.read("lm_head.weight")
    start = _start(work, checkpoint, spec, train, head, text.eos_token_ids, seed)
    ranked = start.pop("ranked_tokens")
    draft_ids = np.sort(ranked[: sizes.draft_vocabulary]).astype(np.int32)
    inside = share_inside(held_out, draft_ids)
    print(f"draft vocabulary: {inside:.1%} of the tokens of held-out answers are in it")
    layer = MtpLayer(spec, start, MAX_SEQUENCE + DRAFTS)
    common_ids = ranked[: min(_COMMON, len(draft_ids))]
    drafter = Drafter(layer, embedding, head, draft_ids, common_ids)
    training = Training(work, layer, drafter, TrainingPlan(sizes.num_steps, seed))
    facts = {
        "target": text.name,
        "target_identity": checkpoint.identity(),
        "answer_tokens": str(sum(len(c.token_ids) - c.prompt_len for c in train)),
    }

    def save_weights() -> None:
        last = training.log[-1]
        rates = " ".join(f"{rate:.3f}" for rate in last["acceptance"])
        now = {**facts, "steps": str(last["step"]), "held_out_acceptance": rates}
        arrays = {name: weight.numpy() for name, weight in layer.weights.items()}
        save_layer(output, spec.num_layers, arrays, draft_ids, now)

    training.run(train, held_out, save_weights)
    save_weights()  # to another output than before, perhaps


def _write_corpus(
    folder: Path, work: WorkFolder, sizes: Sizes, seed: int, num_threads: int
) -> TextModel:
    """Run the first two phases; the model's weights and KV cache are freed afterwards."""
    model = TargetModel(folder, _NUM_SLOTS, num_threads)
    messages = write_messages(model, work, sizes.num_messages, seed)
    write_answers(model, work, messages, sizes.answer_tokens, seed)
    return model.text


def _start(
    work: WorkFolder,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    train: list[Conversation],
    head: np.ndarray,
    eos_token_ids: frozenset[int],
    seed: int,
) -> dict[str, np.ndarray]:
    """Return first weights and `ranked_tokens`, computed once for a work folder."""
    kept = work.read_arrays("start.npz")
    if kept is None:
        draws = [np.random.default_rng((seed, part)) for part in (2, 3)]
        kept = first_weights(checkpoint, spec, train, draws[1])
        kept["ranked_tokens"] = rank_tokens(train, head, eos_token_ids, draws[0])
        work.write_arrays("start.npz", kept)
    return kept


def save_layer(
    path: Path,
    layer_index: int,
    weights: Mapping[str, np.ndarray],
    draft_ids: np.ndarray,
    facts: Mapping[str, str],
) -> None:
    """Write the layer as safetensors: float16 weights as layer `layer_index`, int32 draft ids."""
    tensors = {
        f"model.layers.{layer_index}.{name}": weight.astype(np.float16)
        for name, weight in weights.items()
    }
    tensors["draft_token_ids"] = draft_ids
    metadata = {"format": "pdserve-mtp", "num_layers": "1", **facts}
    write_whole(path, lambda temporary: save_file(tensors, temporary, metadata))
