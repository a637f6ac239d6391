"""What an MTP layer drafts, against a float64 decoder, however the step was cut."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from tests.support.models.mtp_running import (
    TARGETS,
    chunk,
    draft_ids,
    ids,
    load_with_mtp,
    only,
    slots,
    step,
    write_beside,
    write_inside,
)
from tests.support.models.reference_decoder import reference_drafts
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    in_bytes,
    mtp_weights_of,
    prompt_of,
    weights_of,
)

TABLE = [12, 3, 5, 1, 8, 20, 9, 10, 2, 6]
PROMPT = prompt_of(50)


@pytest.mark.parametrize("backend", ["numba", "paddle"])
@pytest.mark.parametrize("layout", TARGETS)
def test_drafts_are_those_of_the_float64_layer(tmp_path: Path, layout: str, backend: str) -> None:
    """At the end of a prompt, then behind an accepted and behind a rejected draft."""
    config = CONFIGS[TARGETS[layout]]
    weights, mtp = weights_of(config), mtp_weights_of(config, layout)
    runner = load_with_mtp(write_inside(tmp_path, layout), attention_backend=backend)
    runner.kv_bytes.fill(0xFF)  # NaN: nothing that was not computed may be read
    runner.execute(batch_of([chunk(PROMPT, 0, 20, TABLE)]))
    known, computed = list(PROMPT), 20
    for are_right in ([], [False], [True], [True, False]):
        clean = only(runner.execute(batch_of([step(known, computed, TABLE)])))
        drafts = [ids(clean)[0] if is_right else (ids(clean)[0] + 1) % 97 for is_right in are_right]
        result = only(
            runner.execute(batch_of([step(known, computed, TABLE, drafts, num_proposals=4)]))
        )
        assert len(ids(result)) >= 1 + sum(are_right)
        computed = len(known) + len(ids(result)) - 1
        known += ids(result)
        assert list(result.draft_token_ids) == reference_drafts(config, weights, mtp, known, 4)


@pytest.mark.parametrize("backend", ["numba", "paddle"])
@pytest.mark.parametrize("family", ["llama_tied_biased", "qwen3", "qwen3_yarn", "qwen2"])
def test_a_file_with_a_vocabulary_of_its_own(tmp_path: Path, family: str, backend: str) -> None:
    config = CONFIGS[family]
    folder, file = write_beside(tmp_path, family, num_draft_ids=37)
    runner = load_with_mtp(folder, file, attention_backend=backend)
    result = only(runner.execute(batch_of([step(PROMPT, 0, TABLE, num_proposals=5)])))
    mtp = mtp_weights_of(config, "deepseek") | {"draft_token_ids": draft_ids(37)}
    known = [*PROMPT, *ids(result)]
    weights = weights_of(config)
    name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    head = in_bytes(weights[name]) if backend == "numba" else weights[name]
    wanted = reference_drafts(config, weights, mtp, known, 5, head)
    assert list(result.draft_token_ids) == wanted
    assert set(wanted) <= set(draft_ids(37).tolist())


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_with_mtp(write_inside(tmp_path_factory.mktemp("mimo"), "mimo"))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 49])
def test_chunks_of_any_size_leave_the_same_keys_values_and_drafts(
    runner: ModelRunner, size: int
) -> None:
    runner.kv_bytes.fill(0xFF)
    whole = only(runner.execute(batch_of([step(PROMPT, 0, TABLE, num_proposals=3)])))
    wanted = slots(runner, TABLE, len(PROMPT))
    assert wanted.shape[0] == 3
    assert np.isfinite(wanted).all()
    runner.kv_bytes.fill(0xFF)
    start = 0
    while start + size < len(PROMPT):
        runner.execute(batch_of([chunk(PROMPT, start, start + size, TABLE)]))
        start += size
    assert only(runner.execute(batch_of([step(PROMPT, start, TABLE, num_proposals=3)]))) == whole
    np.testing.assert_array_equal(slots(runner, TABLE, len(PROMPT)), wanted)


def test_tokens_without_proposals_leave_the_same_keys_and_values(runner: ModelRunner) -> None:
    """A drafter that was off for a while drafts as one that never was."""
    known, computed, rounds = list(PROMPT), 0, []
    for num_proposals in (0, 3):
        runner.kv_bytes.fill(0xFF)
        known, computed = list(PROMPT), 0
        for _ in range(12):
            result = only(
                runner.execute(
                    batch_of([step(known, computed, TABLE, num_proposals=num_proposals)])
                )
            )
            assert len(result.draft_token_ids) == num_proposals
            computed = len(known)
            known += ids(result)
        last = only(runner.execute(batch_of([step(known, computed, TABLE, num_proposals=3)])))
        rounds.append((known, last, slots(runner, TABLE, len(known))))
    assert rounds[0][:2] == rounds[1][:2]
    np.testing.assert_array_equal(rounds[0][2], rounds[1][2])


def test_neighbours_change_no_draft(runner: ModelRunner) -> None:
    prompts = [prompt_of(3 + 5 * i, seed=i) for i in range(6)]
    tables = [[20 + 3 * i, 21 + 3 * i, 22 + 3 * i] for i in range(6)]
    alone = [
        runner.execute(batch_of([step(prompt, 0, table, num_proposals=i)]))[0]
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    runner.kv_bytes.fill(0xFF)
    batch = [
        step(prompt, 0, table, num_proposals=i)
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    between = chunk(PROMPT, 0, 20, TABLE)
    assert runner.execute(batch_of([*batch[:3], between, *batch[3:]])) == [
        *alone[:3],
        None,
        *alone[3:],
    ]


@pytest.mark.parametrize(
    ("length", "num_blocks", "wanted"), [(13, 1, 3), (15, 1, 2), (16, 1, 1), (16, 2, 3)]
)
def test_no_more_drafts_than_there_are_slots_for(
    runner: ModelRunner, length: int, num_blocks: int, wanted: int
) -> None:
    """Draft n is computed at the slot of draft n - 1; the first one needs none of its own."""
    prompt = prompt_of(length)
    result = only(runner.execute(batch_of([step(prompt, 0, TABLE[:num_blocks], num_proposals=3)])))
    assert len(result.draft_token_ids) == wanted


def test_no_draft_is_computed_beyond_the_longest_sequence(runner: ModelRunner) -> None:
    longest = prompt_of(runner.max_model_len)
    table = range(runner.max_model_len // 16 + 1)
    for start in range(0, len(longest) - 64, 64):
        runner.execute(batch_of([chunk(longest, start, start + 64, table)]))
    result = only(
        runner.execute(batch_of([step(longest, len(longest) - 64, table, num_proposals=3)]))
    )
    assert len(result.draft_token_ids) == 1


def test_broken_keys_and_values_of_the_layer_cost_drafts_and_no_answer(
    runner: ModelRunner,
) -> None:
    runner.execute(batch_of([chunk(PROMPT, 0, 40, TABLE)]))
    whole = only(runner.execute(batch_of([step(PROMPT, 40, TABLE, num_proposals=3)])))
    runner.kv_bytes[2] = 0xFF
    broken = only(runner.execute(batch_of([step(PROMPT, 40, TABLE, num_proposals=3)])))
    assert broken.token_ids == whole.token_ids
    assert all(0 <= token < 97 for token in broken.draft_token_ids)


@pytest.mark.parametrize("num_draft_ids", [0, 40])
def test_nodes_of_a_machine_share_the_weights_and_draft_the_same(
    tmp_path: Path, num_draft_ids: int
) -> None:
    target, file = write_beside(tmp_path, "llama", num_draft_ids)
    drafts = []
    for packed_folder in (None, tmp_path / "packed", tmp_path / "packed"):
        runner = load_with_mtp(target, file, packed_folder=packed_folder)
        drafts.append(
            only(
                runner.execute(batch_of([step(PROMPT, 0, TABLE, num_proposals=3)]))
            ).draft_token_ids
        )
    assert drafts[0] == drafts[1] == drafts[2] != ()
    # One file of the model's weights and one of the layer's, each packed once.
    sizes = [path.stat().st_size for path in (tmp_path / "packed").rglob("*.packed")]
    assert len(sizes) == 2
    assert runner.memory is not None
    assert runner.memory.shared_bytes == sum(sizes) - len(sizes) * mmap.PAGESIZE
