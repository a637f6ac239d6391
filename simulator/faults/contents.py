"""Blocks of KV with contents, and the answers that follow from them.

A slot holds a number that depends on its token, on all tokens before it, and on the layer. What a
step draws depends on the sum of all slots that its sequence reads, on the request's seed, and on
the position. So an answer is right exactly if every slot was, whatever moved it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NUM_LAYERS = 2
VOCAB_SIZE = 64
STOP_TOKEN_ID = 1
_MASK = (1 << 64) - 1
_FIRST = 0x9E3779B97F4A7C15
_LAYERS = np.array([0, 0x5851F42D4C957F2D], np.uint64)
_LAYER_SUM = int(_LAYERS.sum())

_SPOILED = 0xBAD0BAD0BAD0BAD0

Numbers = npt.NDArray[np.uint64]


def _mixed(number: int) -> int:
    number = (number ^ (number >> 31)) * 0xBF58476D1CE4E5B9 & _MASK
    return number ^ (number >> 29)


def next_state(state: int, token_id: int) -> int:
    """Return the number of a slot after the one with number `state`."""
    return _mixed((state ^ (token_id + 1) * 0x94D049BB133111EB) & _MASK)


FIRST_STATE = _FIRST


def token_of(total: int, seed: int, num_known: int) -> int:
    """Return what is drawn after `num_known` tokens whose slots add up to `total`.

    With an odd seed most tokens are one of three, so that drafts are often right.
    """
    key = (seed + 1) * 0xD6E8FEB86659FD93 + num_known * 0xA0761D6478BD642F
    number = _mixed((total ^ key) & _MASK) >> 7
    if seed % 2 and number % 16:
        return 2 + number // 16 % 3
    return number // 16 % VOCAB_SIZE


def total_of(states: Sequence[int]) -> int:
    """Return what the slots of these states add up to, in all layers."""
    return (NUM_LAYERS * sum(states) + len(states) * _LAYER_SUM) & _MASK


def states_of(token_ids: Sequence[int]) -> list[int]:
    """Return the states of the slots of these tokens, which begin a text."""
    state, states = FIRST_STATE, []
    for token_id in token_ids:
        state = next_state(state, token_id)
        states.append(state)
    return states


def values_of(states: Sequence[int]) -> Numbers:
    """Return what slots of these states hold, `[layer, slot]`."""
    return np.array(states, np.uint64) + _LAYERS[:, None]


def right_answer(prompt: Sequence[int], seed: int, max_tokens: int) -> tuple[int, ...]:
    """Return the answer of an undisturbed run, its stop token included."""
    states = states_of(prompt)
    state = states[-1]
    total, num_known = total_of(states), len(prompt)
    answer: list[int] = []
    while len(answer) < max_tokens:
        token_id = token_of(total, seed, num_known)
        answer.append(token_id)
        if token_id == STOP_TOKEN_ID:
            break
        state = next_state(state, token_id)
        total = (total + total_of((state,))) & _MASK
        num_known += 1
    return tuple(answer)


def prompt_of(group: int, num_shared: int, num_prompt: int, own: int) -> tuple[int, ...]:
    """Return a prompt whose first `num_shared` tokens are those of its group."""
    shared = [2 + (group * 7 + i * 3) % 61 for i in range(min(num_shared, num_prompt))]
    return (*shared, *(2 + (own * 11 + i * 5) % 61 for i in range(num_prompt - len(shared))))


class KVMemory:
    """The blocks of one node, and those in its host's memory: `[layer, block, slot]`.

    Steps read and write `slots`. With `is_staged` transfers read and write other memory.
    """

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, *, is_staged: bool = False
    ) -> None:
        self.block_size = block_size
        self.slots: Numbers = np.zeros((NUM_LAYERS, num_blocks, block_size), np.uint64)
        self.host: Numbers = np.zeros((NUM_LAYERS, num_host_blocks, block_size), np.uint64)
        self._staged = np.zeros_like(self.slots) if is_staged else self.slots

    def state_before(self, table: Sequence[int] | npt.NDArray[np.int32], position: int) -> int:
        """Return the state that the slot before `position` holds."""
        if position == 0:
            return FIRST_STATE
        block, slot = divmod(position - 1, self.block_size)
        return int(self.slots[0, table[block], slot])

    def write(
        self, layer: int, table: npt.NDArray[np.int32], start: int, states: Sequence[int]
    ) -> None:
        """Write the states of the tokens from `start` on, in one layer."""
        offset, size = _LAYERS[layer], self.block_size
        of_layer = self.slots[layer]
        for position, state in enumerate(states, start):
            of_layer[table[position // size], position % size] = state
        if layer:
            positions = np.arange(start, start + len(states))
            of_layer[table[positions // size], positions % size] += offset

    def total(self, table: npt.NDArray[np.int32], end: int) -> int:
        """Return what the first `end` slots add up to, in all layers."""
        num_blocks = -(-end // self.block_size)
        read = self.slots[:, table[:num_blocks]].reshape(NUM_LAYERS, -1)[:, :end]
        return int(read.sum())

    @property
    def is_staged(self) -> bool:
        """Whether transfers read and write other memory than steps."""
        return self._staged is not self.slots

    def read(self, layer: int, blocks: Sequence[int]) -> Numbers:
        """Return a copy of one layer of blocks, where transfers read them, all of one memory; those
        of the host come behind those of the node, as a transfer numbers them."""
        num_blocks = self.slots.shape[1]
        if blocks[0] < num_blocks:
            return self._staged[layer, list(blocks)]
        return self.host[layer, [block - num_blocks for block in blocks]]

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the host's memory."""
        num_blocks: int = self.host.shape[1]
        return num_blocks

    def put(self, layer: int, blocks: Sequence[int], values: Numbers) -> None:
        """Overwrite one layer of blocks, where transfers write them."""
        self._staged[layer, list(blocks)] = values

    def stage_in(self, blocks: Sequence[int]) -> None:
        """Copy blocks from where transfers have written them."""
        self.slots[:, list(blocks)] = self._staged[:, list(blocks)]

    def stage_out(self, blocks: Sequence[int], layer: int | slice = slice(None)) -> None:
        """Copy blocks to where transfers read them."""
        self._staged[layer, list(blocks)] = self.slots[layer, list(blocks)]

    def spoil(self, blocks: Sequence[int]) -> None:
        """Let blocks hold nothing of use."""
        self.slots[:, list(blocks)] = _SPOILED

    def spoil_host(self, host_blocks: Sequence[int]) -> None:
        """Let blocks in the host's memory hold nothing of use."""
        self.host[:, list(host_blocks)] = _SPOILED

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks into host memory."""
        self.host[:, list(host_blocks)] = self.slots[:, list(blocks)]

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks back from host memory."""
        self.slots[:, list(blocks)] = self.host[:, list(host_blocks)]
