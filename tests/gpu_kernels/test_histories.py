"""Random histories of a node on a card that answers late, in any order that events allow, and with
all that touches the same bytes compared with what events order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import FAMILIES, on_card, put_interpreter_in_place  # isort: skip
from tests.gpu_kernels.late_device import LateCard, LateDevice  # isort: skip
from tests.gpu_kernels.ordered_device import OrderedCard, OrderedDevice  # isort: skip

import pytest

from common.request import SamplingParams
from engine.runner.cache import device_copies
from engine.runner.gpu.drawing.left_rows import LeftRows
from tests.gpu_kernels.histories import HAPPENS, History, PlayedThread
from tests.gpu_kernels.known_answers import MOST_DRAWN, Kind, answered
from tests.support.models.tiny_checkpoints import prompt_of, write_checkpoint

NUM_STEPS = 10
MOVES = (
    "chunks", "gone on", "drafts", "handed off", "sent", "from ring", "from peer", "swap_out",
    "swap_in",
)  # fmt: skip
"""What is to happen where only the order of accesses is compared."""
WAYS: list[tuple[int, dict[str, Any]]] = [
    (33, {"temperature": 0.0}),
    (21, {"temperature": 1.0, "frequency_penalty": 0.5, "logprobs": 2}),
    (34, {"temperature": 0.8, "top_p": 0.9, "logprobs": 0}),
    # A row whose last kept token depends on the order of sums, so that the host draws it.
    (6, {"temperature": 1.0, "top_p": 1 - 1e-13}),
]
"""Lengths of prompts, and how their tokens are drawn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def kinds(folder: Path) -> list[Kind]:
    with pytest.MonkeyPatch.context() as patch:
        put_interpreter_in_place(patch)
        return answered(
            on_card(folder),
            [
                Kind(
                    prompt_of(length, place),
                    SamplingParams(max_tokens=MOST_DRAWN, seed=place, **way),
                )
                for place, (length, way) in enumerate(WAYS)
            ],
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seeds", "is_late"),
    [
        pytest.param((0, 2, 4, 6), True, id="as late as possible"),
        pytest.param((1, 3, 5, 7), False, id="in any order"),
    ],
)
def test_whatever_happens_answers_and_blocks_are_those_of_the_programs_order(
    folder: Path, kinds: list[Kind], seeds: Sequence[int], is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Work runs when something waits for it, or when it may; all that can happen does."""
    counts = Counter[str]()
    monkeypatch.setattr(LeftRows, "logits", _counting(LeftRows.logits, counts))
    for seed in seeds:
        try:
            counts += _played(folder, kinds, seed, LateDevice(seed=None if is_late else seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert [one for one in (*HAPPENS, "left to the host") if not counts[one]] == []


@pytest.mark.timeout(600)
def test_what_touches_the_same_bytes_is_ordered(folder: Path, kinds: list[Kind]) -> None:
    """By a stream, by events, or by a wait of the host: whenever the card comes to it."""
    counts = Counter[str]()
    for seed in (8, 10):
        counts += _played(folder, kinds, seed, OrderedDevice())
    assert [one for one in MOVES if not counts[one]] == []


def _played(folder: Path, kinds: list[Kind], seed: int, device: Any) -> Counter[str]:
    """Play a history on this card, and return what has happened in it."""
    thread = PlayedThread()
    with pytest.MonkeyPatch.context() as patch:
        is_late = isinstance(device, LateDevice)
        put_interpreter_in_place(patch, lambda: device, LateCard if is_late else OrderedCard)
        patch.setattr(device_copies, "copying_thread", lambda: thread.submit)
        runner = on_card(folder, num_drafts=3, host_space=1 << 18)
        history = History(runner, kinds, seed, thread)
        history.run(NUM_STEPS)
        history.end()
    assert device.faults == []
    return history.counts


def _counting(logits: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    """Return what brings logits to the host, and counts their rows."""

    def counted(self: LeftRows, places: Any, *, are_kept: bool) -> Any:
        counts["left to the host"] += len(places)
        return logits(self, places, are_kept=are_kept)

    return counted
