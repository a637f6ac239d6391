"""Distilling an MTP layer, on a tiny random model."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from common.errors import ConfigError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint
from tests.support.models.tiny_model import make_tiny_model
from tests.unit.tools.reference_mtp import ReferenceMtp
from tools.mtp_training.batches import (
    DRAFTS,
    make_batch,
    plan_batches,
    split_held_out,
)
from tools.mtp_training.distil import Sizes, distil
from tools.mtp_training.draft_vocabulary import rank_tokens, share_inside
from tools.mtp_training.drafting import Drafter
from tools.mtp_training.first_weights import first_weights
from tools.mtp_training.generation import write_answers
from tools.mtp_training.mtp_layer import MtpLayer, refuse_other_layers, weight_shapes
from tools.mtp_training.prompt_bank import bank, follow_up
from tools.mtp_training.target_model import MAX_SEQUENCE, TargetModel
from tools.mtp_training.training import Training, TrainingPlan, acceptance
from tools.mtp_training.work_folder import Conversation, WorkFolder
from tools.train_mtp import build_parser

VOCABULARY = 96
ANSWER_TOKENS = 9000
SIZES = Sizes(num_messages=4, answer_tokens=ANSWER_TOKENS, num_steps=2, draft_vocabulary=VOCABULARY)


@dataclass(frozen=True)
class Tiny:
    """A tiny model and a finished corpus of its answers."""

    folder: Path
    work_folder: Path
    spec: DecoderSpec
    checkpoint: Checkpoint
    conversations: list[Conversation]

    def new_training(self, work_folder: Path, num_steps: int) -> tuple[Training, Drafter, MtpLayer]:
        draw = np.random.default_rng(0)
        weights = first_weights(self.checkpoint, self.spec, self.conversations, draw)
        layer = MtpLayer(self.spec, weights, MAX_SEQUENCE + DRAFTS)
        drafter = Drafter(layer, self.embedding, self.head, self.draft_ids, self.draft_ids)
        work = WorkFolder(work_folder, {})
        return Training(work, layer, drafter, TrainingPlan(num_steps, 0, 3)), drafter, layer

    @property
    def embedding(self) -> np.ndarray:
        return self.checkpoint.read("model.embed_tokens.weight")

    @property
    def head(self) -> np.ndarray:
        return self.checkpoint.read("lm_head.weight")

    @property
    def draft_ids(self) -> np.ndarray:
        draw = np.random.default_rng(0)
        ranked = rank_tokens(self.conversations, self.head, frozenset(), draw)
        return np.sort(ranked[:VOCABULARY])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    base = tmp_path_factory.mktemp("mtp")
    folder = make_tiny_model(base / "model")
    distil(folder, base / "work", base / "first.safetensors", SIZES, seed=0, num_threads=1)
    conversations = WorkFolder(base / "work", {}).conversations()
    spec = read_decoder_spec(folder)
    return Tiny(folder, base / "work", spec, Checkpoint(folder, spec), conversations)


def read_file(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_the_corpus_holds_greedy_answers_with_the_states_that_chose_them(tiny: Tiny) -> None:
    head = tiny.head
    assert sum(len(c.token_ids) - c.prompt_len for c in tiny.conversations) >= ANSWER_TOKENS
    for c in tiny.conversations:
        assert len(c.states) == len(c.token_ids) - 1
        logits = c.states[c.prompt_len - 1 :].astype(np.float32) @ head.T
        chosen = logits[np.arange(len(logits)), c.token_ids[c.prompt_len :]]
        assert np.all(chosen >= logits.max(axis=1) - 0.05)  # states are kept in float16


def test_the_file_has_the_contracts_names_shapes_and_dtypes(tiny: Tiny) -> None:
    found, metadata = read_file(tiny.work_folder.parent / "first.safetensors")
    ids = found.pop("draft_token_ids")
    assert ids.dtype == np.int32
    assert len(ids) == VOCABULARY
    assert np.all(np.diff(ids) > 0)
    wanted = {f"model.layers.2.{name}": s for name, s in weight_shapes(tiny.spec).items()}
    assert {name: tensor.shape for name, tensor in found.items()} == wanted
    assert wanted["model.layers.2.eh_proj.weight"] == (64, 128)
    assert {tensor.dtype for tensor in found.values()} == {np.dtype(np.float16)}
    assert metadata["format"] == "pdserve-mtp"
    assert metadata["num_layers"] == "1"
    assert metadata["target"] == "model"
    assert metadata["target_identity"] == tiny.checkpoint.identity()
    assert metadata["steps"] == "2"
    assert len(metadata["held_out_acceptance"].split()) == DRAFTS


def test_a_second_start_of_a_finished_run_writes_the_same_weights(
    tiny: Tiny, tmp_path: Path
) -> None:
    output = tmp_path / "again.safetensors"
    distil(tiny.folder, tiny.work_folder, output, SIZES, seed=0, num_threads=1)
    tensors, metadata = read_file(output)
    first, first_metadata = read_file(tiny.work_folder.parent / "first.safetensors")
    assert metadata == first_metadata
    assert tensors.keys() == first.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, first[name], name)


def test_drafts_are_those_of_an_engine_with_a_kv_cache(tiny: Tiny) -> None:
    draw = np.random.default_rng(11)
    weights = {
        name: draw.standard_normal(shape) * (2 / np.sqrt(shape[-1]) if len(shape) > 1 else 1)
        for name, shape in weight_shapes(tiny.spec).items()
    }
    weights = {name: weight.astype(np.float32) for name, weight in weights.items()}
    layer = MtpLayer(tiny.spec, weights, MAX_SEQUENCE + DRAFTS)
    drafter = Drafter(layer, tiny.embedding, tiny.head, tiny.draft_ids, tiny.draft_ids)
    few = sorted(tiny.conversations, key=lambda c: len(c.token_ids))[1:20:9]
    assert len({c.prompt_len for c in few}) == len({len(c.token_ids) for c in few}) == 3
    batch = make_batch(few, 0.5, draw)
    reference = ReferenceMtp(tiny.spec, weights)
    for number, drafts in enumerate(drafter.drafts(batch), 1):
        found = layer.head_input(drafts.outputs).numpy()
        assert len(found) >= sum(len(c.token_ids) - c.prompt_len for c in few) // 2 - 6
        for j in range(0, len(found), 7):
            c, position = few[drafts.conversations[j]], int(drafts.positions[j])
            embedded = tiny.embedding[c.token_ids]
            expected = reference.drafts(embedded, c.states, position, number)[-1]
            np.testing.assert_allclose(found[j], expected, atol=2e-3)
            assert drafts.targets[j] == c.token_ids[position + number + 1]
            state = drafts.true_states[j].numpy()
            np.testing.assert_array_equal(state, c.states[position + number])


def test_accepted_drafts_are_those_that_are_the_answers_tokens(tiny: Tiny, tmp_path: Path) -> None:
    few = tiny.conversations[:3]
    training, drafter, layer = tiny.new_training(tmp_path / "work", 24)
    training.run(few, few[:1], lambda: None)  # so that some drafts are right
    batch = make_batch(few, 0.5, np.random.default_rng(5))
    outcome = drafter.accepted(batch)
    expected = np.full_like(outcome, -1)
    for index, drafts in enumerate(drafter.drafts(batch)):
        logits = layer.head_input(drafts.outputs).numpy() @ tiny.head[tiny.draft_ids].T
        drafted = tiny.draft_ids[np.argmax(logits, axis=1)]
        for c, position, token, wanted in zip(
            drafts.conversations, drafts.positions, drafted, drafts.targets, strict=True
        ):
            expected[c, position - few[c].prompt_len + 1, index] = token == wanted
    np.testing.assert_array_equal(outcome, expected)
    for number in range(DRAFTS):
        assert {-1, 0, 1} <= set(outcome[..., number].ravel().tolist())


def test_training_lowers_the_loss_and_raises_acceptance(tiny: Tiny, tmp_path: Path) -> None:
    few = tiny.conversations[:2]
    training, drafter, _ = tiny.new_training(tmp_path / "work", 24)
    batch = make_batch(few, 1.0, np.random.default_rng(0))

    def measured() -> tuple[float, float]:
        return float(drafter.loss(batch, np.random.default_rng(0))), acceptance(drafter, few)[0]

    loss_before, accepted_before = measured()
    training.run(few, few, lambda: None)
    loss, accepted = measured()
    assert loss < 0.8 * loss_before
    assert accepted > accepted_before + 0.2
    assert [entry["step"] for entry in training.log] == list(range(3, 25, 3))
    assert training.log[-1]["acceptance"][0] == accepted


def test_a_stopped_training_goes_on_to_the_same_weights(tiny: Tiny, tmp_path: Path) -> None:
    train, held_out = tiny.conversations[:6], tiny.conversations[:1]
    whole, _, undisturbed = tiny.new_training(tmp_path / "whole", 6)
    whole.run(train, held_out, lambda: None)

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    begun, _, _ = tiny.new_training(tmp_path / "part", 6)
    with pytest.raises(Stopped):
        begun.run(train, held_out, stop)
    resumed, _, layer = tiny.new_training(tmp_path / "part", 6)
    assert resumed.step == 3
    resumed.run(train, held_out, lambda: None)
    assert resumed.log == whole.log
    for name, weight in undisturbed.weights.items():
        np.testing.assert_array_equal(layer.weights[name].numpy(), weight.numpy(), name)


def test_a_conversation_with_nothing_to_draft_does_no_harm(tiny: Tiny, tmp_path: Path) -> None:
    c = tiny.conversations[0]
    cut = [
        Conversation("cut", c.token_ids[:n], c.prompt_len, c.states[: n - 1])
        for n in (c.prompt_len + 1, c.prompt_len + 2, c.prompt_len + 3)
    ]
    training, drafter, _ = tiny.new_training(tmp_path / "work", 3)
    training.run(cut[:1], cut, lambda: None)
    assert training.log[-1]["loss"] == 0
    outcome = drafter.accepted(make_batch(cut, 1.0, np.random.default_rng(0)))
    assert (outcome != -1).sum(axis=(1, 2)).tolist() == [0, 1, 3]


def test_stopped_answering_goes_on_without_answering_twice(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.work_folder, tmp_path / "work")
    paths = sorted((tmp_path / "work").glob("answers-*.npz"))
    paths[-1].unlink()
    work = WorkFolder(tmp_path / "work", {})
    kept = work.conversations()
    write_answers(TargetModel(tiny.folder, 16, 1), work, [], ANSWER_TOKENS, 0)
    conversations = work.conversations()
    keys = [c.key for c in conversations]
    assert keys[: len(kept)] == [c.key for c in kept]
    assert len(set(keys)) == len(keys)
    assert sum(len(c.token_ids) - c.prompt_len for c in conversations) >= ANSWER_TOKENS
    same = {c.key: c for c in tiny.conversations}
    for c in conversations[len(kept) :]:
        if c.key in same:  # answered in another company, and yet the same
            np.testing.assert_array_equal(c.token_ids, same[c.key].token_ids)


def test_anything_of_another_run_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    other = make_tiny_model(tmp_path / "other", seed=8)
    with pytest.raises(ConfigError, match=r"begun with model '\w+', not '\w+': wanted the same"):
        distil(other, tiny.work_folder, output, SIZES, seed=0, num_threads=1)
    with pytest.raises(ConfigError, match="begun with seed 0, not 1"):
        distil(tiny.folder, tiny.work_folder, output, SIZES, seed=1, num_threads=1)
    wider = replace(SIZES, draft_vocabulary=128)
    with pytest.raises(ConfigError, match="begun with draft_vocabulary 96, not 128"):
        distil(tiny.folder, tiny.work_folder, output, wider, seed=0, num_threads=1)
    nowhere = tmp_path / "missing" / "out.safetensors"
    with pytest.raises(ConfigError, match=r"--output .*: .*missing is not a folder"):
        distil(tiny.folder, tiny.work_folder, nowhere, SIZES, seed=0, num_threads=1)
    assert not output.exists()


@pytest.mark.parametrize("size", [0, 8, 144])
def test_a_draft_vocabulary_that_does_not_fit_is_refused(size: int) -> None:
    sizes = Sizes(num_messages=1, answer_tokens=1, num_steps=1, draft_vocabulary=size)
    with pytest.raises(ConfigError, match=f"draft_vocabulary is {size}: wanted a multiple of 16"):
        sizes.check(130)


def test_layers_with_other_parts_are_refused(tmp_path: Path) -> None:
    spec = read_decoder_spec(write_checkpoint(tmp_path, CONFIGS["qwen3"]))
    with pytest.raises(ConfigError, match="has_head_norms"):
        refuse_other_layers(spec)


def test_tokens_rank_by_how_many_conversations_hold_them_and_how_likely_they_were() -> None:
    def said(*tokens: int) -> Conversation:
        return Conversation("k", np.array(tokens), 1, np.ones((len(tokens) - 1, 1), np.float16))

    head = np.zeros((12, 1), np.float32)
    head[4] = 1.0  # never said, though likelier than any other
    conversations = [said(5, 3, 3, 3, 3, 3), said(5, 7), said(5, 7, 2), said(5, 1)]
    ranked = rank_tokens(conversations, head, frozenset({11}), np.random.default_rng(0))
    assert ranked.tolist() == [11, 5, 7, 4, 1, 2, 3, 0, 6, 8, 9, 10]
    assert share_inside(conversations, np.array([3, 7])) == 7 / 9


def test_an_epoch_takes_every_conversation_once() -> None:
    lengths = [10 + 37 * i % 400 for i in range(250)]
    batches = plan_batches(lengths, 3)
    epochs: list[list[list[int]]] = []
    for _ in range(2):
        epoch: list[list[int]] = []
        while sum(map(len, epoch)) < len(lengths):
            epoch.append(next(batches))
        assert sorted(itertools.chain(*epoch)) == list(range(250))
        epochs.append(epoch)
    assert epochs[0] != epochs[1]
    assert max(len(b) * max(lengths[i] for i in b) for b in epochs[0]) <= 1024


def test_what_comes_out_of_a_held_out_answer_is_held_out_too() -> None:
    prompts = bank(0)
    assert len({prompt.key for prompt in prompts}) == len(prompts) > 2000
    made = [follow_up(prompt, "Some answer. " * 20, 0) for prompt in prompts]
    followers = [prompt for prompt in made if prompt is not None]
    assert 0.3 < len(followers) / len(prompts) < 0.5
    nothing = np.zeros((0, 1))
    all_keys = [prompt.key for prompt in (*prompts, *followers)]
    train, held_out = split_held_out([Conversation(k, nothing, 0, nothing) for k in all_keys])
    roots = [{c.key.split("+")[0] for c in part} for part in (train, held_out)]
    assert not roots[0] & roots[1]
    assert 0.02 < len(held_out) / len(all_keys) < 0.05


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--model", "--output", "--work-folder", "--answer-tokens", "--steps", "--seed"):
        assert option in shown
