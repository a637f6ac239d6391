"""What leaves a real model while it computes: every piece once, in order, with its final bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.kv.blocks import blocks_for
from engine.core.runner_contract import SequencesFailed
from engine.core.step.step_batch import batch_of
from engine.runner.cache.kv_cache import KVCache
from engine.runner.model_runner import ModelRunner
from tests.support.engine.mirrored_cache import mirrored_caches
from tests.support.models.mtp_running import chunk, load_with_mtp, only, step, write_inside
from tests.support.models.running import kv_cache_of, load, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.unit.engine.runner.exporting import PrefillNode

BLOCK_SIZE = 16
KINDS = ["numba", "numba mirrored", "paddle", "paddle mirrored", "mtp", "mtp mirrored"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plain, with_mtp = (tmp_path_factory.mktemp(name) for name in ("plain", "mtp"))
    return {
        "plain": write_checkpoint(plain, CONFIGS["llama"]),
        "mtp": write_inside(with_mtp, "deepseek"),
    }


def make_runner(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> ModelRunner:
    """`mirrored`: what is sent is another memory than what is computed in."""
    with mirrored_caches() if kind.endswith("mirrored") else nullcontext():
        if kind.startswith("mtp"):
            return load_with_mtp(folders["mtp"])
        return load(folders["plain"], attention_backend=kind.split()[0])


def computed_bytes(runner: ModelRunner) -> np.ndarray:
    """The memory that is computed in, `[layers, 2, blocks, piece_bytes]`."""
    shape = runner.kv_bytes.shape
    return kv_cache_of(runner).slots().reshape(shape)


def check_pushed(node: PrefillNode, lease_token: int, prompt: Sequence[int]) -> None:
    """All pieces were pushed, each with the bytes that it has now."""
    layout, connector = node.runner.layout, node.connector
    num_blocks = len(connector.tickets[lease_token].target_block_ids)
    pieces = connector.pieces[lease_token]
    assert set(pieces) == {(i, j) for i in range(layout.num_layers) for j in range(num_blocks)}
    now = computed_bytes(node.runner)
    for (layer, ordinal), pushed in pieces.items():
        block = connector.source_blocks[lease_token][layer, ordinal]
        np.testing.assert_array_equal(pushed, now[layer, :, block])
    assert connector.commits[lease_token].num_tokens == len(prompt)


def unchunked(runner: ModelRunner, prompt: Sequence[int]) -> np.ndarray:
    """Keys and values of a prompt computed in one step, `[layers, 2, heads, positions, dim]`."""
    table = list(range(runner.num_blocks - blocks_for(len(prompt), BLOCK_SIZE), runner.num_blocks))
    runner.execute(batch_of([step(prompt, 0, table)]))
    parts = [computed_bytes(runner)[:, :, block] for block in table]
    return positions_of(runner, parts)[..., : len(prompt), :]


def positions_of(runner: ModelRunner, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Blocks `[layers, 2, piece_bytes]` behind each other."""
    layout = runner.layout
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return np.concatenate(
        [np.ascontiguousarray(one).view(np.float32).reshape(shape) for one in parts], axis=3
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [7, 16, 40, 200])
def test_every_piece_of_a_chunked_prompt_leaves_once_and_final(
    folders: dict[str, Path], kind: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folders, kind, monkeypatch)
    num_layers = runner.layout.num_layers
    node = PrefillNode(runner, budget=budget, num_drafts=3 if kind.startswith("mtp") else 0)
    prompts = {1: prompt_of(61), 2: prompt_of(30)[::-1], 3: [7, *prompt_of(95)]}
    for lease_token, prompt in prompts.items():
        node.ask(lease_token, prompt)
    num_turns_with_pushes = 0
    while len(node.connector.commits) < 3:
        node.connector.pushes.clear()
        assert node.loop.turn()
        pushed = [(token, layer) for token, layer, _ in node.connector.pushes]
        num_turns_with_pushes += bool(pushed)
        for transfer in {token for token, _ in pushed}:
            layers = [layer for token, layer in pushed if token == transfer]
            assert layers == sorted(layers)
            assert set(layers) == set(range(num_layers))
    assert num_turns_with_pushes >= (61 + 30 + 96) // max(budget, BLOCK_SIZE) // 2
    for lease_token, prompt in prompts.items():
        check_pushed(node, lease_token, prompt)
        wanted = unchunked(runner, prompt)
        pieces = node.connector.pieces[lease_token]
        num_blocks = len(node.connector.tickets[lease_token].target_block_ids)
        sent = positions_of(
            runner,
            [np.stack([pieces[i, j] for i in range(num_layers)]) for j in range(num_blocks)],
        )[..., : len(prompt), :]
        if kind.startswith("numba"):
            np.testing.assert_array_equal(sent, wanted)
        elif kind.startswith("mtp"):
            # The drafting layer's slot behind the prompt's last token depends on what was drawn.
            np.testing.assert_array_equal(sent[:-1], wanted[:-1])
            np.testing.assert_array_equal(sent[-1, ..., :-1, :], wanted[-1, ..., :-1, :])
        else:
            np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-5)
        if kind.startswith("mtp"):
            assert len(node.connector.commits[lease_token].draft_token_ids) > 0
        node.end(lease_token)
    assert not node.scheduler.exporting


@pytest.mark.parametrize("kind", KINDS)
def test_cached_prefixes_are_sent_whole_unless_decode_has_them(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folders, kind, monkeypatch)
    node = PrefillNode(runner, budget=200)
    prompt = prompt_of(70)
    node.ask(1, prompt)
    node.loop.turn()
    node.end(1)
    runner.cache.host_bytes[:] = 0 if kind.endswith("mirrored") else runner.cache.host_bytes
    longer = [*prompt[:64], *prompt_of(26)[::-1]]
    node.ask(2, longer)
    node.connector.pushes.clear()
    node.loop.turn()
    num_layers = runner.layout.num_layers
    assert node.connector.pushes == [
        *((2, layer, 4) for layer in range(num_layers)),
        *((2, layer, 2) for layer in range(num_layers)),
    ]
    node.loop.turn()  # It reads that the copies have ended, and the commit follows.
    check_pushed(node, 2, longer)
    node.ask(3, longer, num_cached_tokens=32)
    node.connector.pushes.clear()
    node.loop.turn()
    assert [count for _, _, count in node.connector.pushes] == [3] * num_layers + [1] * num_layers
    node.loop.turn()
    check_pushed(node, 3, longer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_neighbour_does_not_change_when_layers_are_told_of(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folders, kind, monkeypatch)
    computed_bytes(runner)[:, :, 50] = 0xFF  # NaN in what this sequence did compute, as it says
    told: list[int] = []
    good, bad = scheduled([3, 4], 0, [1]), scheduled([5], 16, [50, 51])
    with pytest.raises(SequencesFailed) as caught:
        runner.execute(batch_of([good, bad]), told.append)
    assert list(caught.value.errors) == [1]
    assert told == list(range(runner.layout.num_layers))
    told.clear()
    runner.execute(batch_of([good]), told.append)
    assert told == list(range(runner.layout.num_layers))
    assert runner.execute(batch_of([]), told.append) == []
    assert len(told) == runner.layout.num_layers


@pytest.mark.parametrize("kind", KINDS)
def test_the_hook_changes_no_token(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folders, kind, monkeypatch)
    prompt, table = prompt_of(40), [5, 3, 8]
    runner.execute(batch_of([chunk(prompt, 0, 33, table)]))
    wanted = only(runner.execute(batch_of([step(prompt, 33, table, num_proposals=3)])))
    runner.execute(batch_of([chunk(prompt, 0, 33, table)]), lambda layer: None)
    last = [step(prompt, 33, table, num_proposals=3)]
    assert only(runner.execute(batch_of(last), lambda layer: None)) == wanted


class LateCopy:
    """Never done before somebody waits for it."""

    def __init__(self, cache: KVCache, layer: int, block_ids: np.ndarray) -> None:
        self._all = cache, layer, block_ids

    def is_done(self) -> bool:
        return False

    def finish(self) -> None:
        cache, layer, block_ids = self._all
        cache._copy_layer_out(layer, block_ids, cache.host_bytes[layer], block_ids)


@pytest.mark.parametrize("kind", ["numba mirrored", "mtp mirrored"])
def test_a_step_ends_when_all_that_it_computed_was_copied_and_told_of(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folders, kind, monkeypatch)
    cache = kv_cache_of(runner)
    monkeypatch.setattr(cache, "_start_copy", partial(LateCopy, cache))
    seen: list[tuple[int, bytes]] = []

    def on_layer(layer: int) -> None:
        seen.append((layer, runner.kv_bytes[layer, :, [1, 2]].tobytes()))

    prompt = prompt_of(20)
    runner.execute(batch_of([step(prompt, 0, [1, 2])]), on_layer)
    now = computed_bytes(runner)
    layers = range(runner.layout.num_layers)
    assert seen == [(layer, now[layer, :, [1, 2]].tobytes()) for layer in layers]
    computed_bytes(runner)[:, :, 50] = 0xFF
    seen.clear()
    with pytest.raises(SequencesFailed):
        runner.execute(batch_of([step(prompt, 0, [1, 2]), scheduled([5], 16, [50, 51])]), on_layer)
    assert [layer for layer, _ in seen] == list(layers)


def test_an_error_in_the_hook_ends_the_step(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folders, "numba", monkeypatch)

    def fail(layer: int) -> None:
        raise ValueError(f"at layer {layer}")

    with pytest.raises(ValueError, match="at layer 0"):
        runner.execute(batch_of([scheduled([3, 4], 0, [1])]), fail)
