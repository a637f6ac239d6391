"""Blocks of KV with contents, and the answers that follow from them.

A slot holds a number that depends on its token, on all tokens before it, and on the layer. What a
step draws depends on the sum of all slots that its sequence reads, on the request's seed, and on
the position. So an answer is right exactly if every slot was, whatever moved it there.

Nodes of another revision write the same answers with other numbers: what they read of the KV of an
earlier revision is wrong.

A block in one layer is a tuple of its slots: most operations move or compare a few whole blocks,
and small arrays are slow at that.
"""

from __future__ import annotations

from collections.abc import Sequence

VOCAB_SIZE = 64
STOP_TOKEN_ID = 1
GRAMMAR_ENDS_AT = 18
"""The token of an answer that a grammar allows to be the last one alone. It is drafted too."""
_MASK = (1 << 64) - 1
_FIRST = 0x9E3779B97F4A7C15
_OFFSETS = (0, 0x5851F42D4C957F2D)
"""The number that each layer adds to the state of a slot."""
NUM_LAYERS = len(_OFFSETS)
_LAYER_SUM = sum(_OFFSETS)

REVISIONS = 0, 1
"""The revisions of the nodes of one history: before and after an upgrade."""
_OF_REVISION = 0x2545F4914F6CDD1D
"""The number that each revision adds to a slot."""
_SPOILED = 0xBAD0BAD0BAD0BAD0

Slots = tuple[int, ...]
"""A block in one layer: 64 bits for each slot."""
Numbers = list[Slots]
"""Some blocks in one layer, or one block in every layer."""


def _mixed(number: int) -> int:
    number = (number ^ (number >> 31)) * 0xBF58476D1CE4E5B9 & _MASK
    return number ^ (number >> 29)


def next_state(state: int, token_id: int) -> int:
    """Return the number of a slot after the one with number `state`."""
    return _mixed((state ^ (token_id + 1) * 0x94D049BB133111EB) & _MASK)


FIRST_STATE = _FIRST


def token_of(total: int, seed: int, num_known: int) -> int:
    """Return the token drawn after `num_known` tokens whose slots add up to `total`.

    With an odd seed most tokens are one of three, so that drafts are often right.
    """
    key = (seed + 1) * 0xD6E8FEB86659FD93 + num_known * 0xA0761D6478BD642F
    number = _mixed((total ^ key) & _MASK) >> 7
    if seed % 2 and number % 16:
        return 2 + number // 16 % 3
    return number // 16 % VOCAB_SIZE


def forced_token(index: int) -> int | None:
    """Return the only token that a grammar allows as token `index` of an answer; None: any is."""
    if index == GRAMMAR_ENDS_AT:
        return STOP_TOKEN_ID
    return 2 + index * 5 % 61 if index % 5 in (1, 3, 4) else None


def drawn_token(total: int, seed: int, num_known: int, grammar_from: int | None) -> int:
    """Return the token drawn, as `token_of`; under a grammar if the answer begins at that index."""
    forced = None if grammar_from is None else forced_token(num_known - grammar_from)
    return token_of(total, seed, num_known) if forced is None else forced


def forced_after(num_known: int, grammar_from: int | None) -> tuple[int, ...]:
    """Return the tokens that must follow `num_known` ones."""
    forced: list[int] = []
    while grammar_from is not None:
        token_id = forced_token(num_known + len(forced) - grammar_from)
        if token_id is None:
            break
        forced.append(token_id)
        if token_id == STOP_TOKEN_ID:
            break
    return tuple(forced)


def logprob_of(total: int, num_known: int) -> float:
    """Return the log probability of the token that is drawn as `token_of`, or stands there."""
    number = _mixed((total ^ num_known * 0xE7037ED1A0B428DB) & _MASK)
    return -(number >> 40) / 65536


def logprobs_of(token_ids: Sequence[int], start: int) -> tuple[float, ...]:
    """Return the log probability of each token of a text from token `start` on, which has others
    before it."""
    states = states_of(token_ids)
    total, found = total_of(states[:start]), []
    for num_known in range(start, len(token_ids)):
        found.append(logprob_of(total, num_known))
        total = (total + total_of(states[num_known : num_known + 1])) & _MASK
    return tuple(found)


def total_of(states: Sequence[int]) -> int:
    """Return the sum of the slots of these states over all layers."""
    return (NUM_LAYERS * sum(states) + len(states) * _LAYER_SUM) & _MASK


def states_of(token_ids: Sequence[int]) -> list[int]:
    """Return the states of the slots of these tokens, which begin a text."""
    state, states = FIRST_STATE, []
    for token_id in token_ids:
        state = next_state(state, token_id)
        states.append(state)
    return states


def values_of(states: Sequence[int], revision: int = 0) -> Numbers:
    """Return the slots of these states in every layer, as one block."""
    return [tuple([(state + offset) & _MASK for state in states]) for offset in _offsets(revision)]


def _offsets(revision: int) -> tuple[int, ...]:
    return tuple(offset + revision * _OF_REVISION for offset in _OFFSETS)


def right_answer(
    prompt: Sequence[int], seed: int, max_tokens: int, *, has_grammar: bool = False
) -> tuple[int, ...]:
    """Return the answer of an undisturbed run, its stop token included."""
    states = states_of(prompt)
    state = states[-1]
    total, num_known = total_of(states), len(prompt)
    answer: list[int] = []
    while len(answer) < max_tokens:
        token_id = drawn_token(total, seed, num_known, len(prompt) if has_grammar else None)
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
    """The blocks of one node, and those in its host's memory: `[layer][block][slot]`.

    Steps read and write `slots`. With `is_staged` transfers read and write other memory.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        *,
        is_staged: bool = False,
        revision: int = 0,
    ) -> None:
        self.block_size = block_size
        self.slots = _empty(num_blocks, block_size)
        self.host = _empty(num_host_blocks, block_size)
        self._staged = _empty(num_blocks, block_size) if is_staged else self.slots
        self._spoiled = (_SPOILED,) * block_size
        self._offsets = _offsets(revision)
        self._of_slot = (sum(self._offsets) - _LAYER_SUM) & _MASK
        """The difference of a slot's sum over all layers from that of the first revision."""

    def state_before(self, table: Sequence[int], position: int) -> int:
        """Return the state that the slot before `position` holds."""
        if position == 0:
            return FIRST_STATE
        block, slot = divmod(position - 1, self.block_size)
        return (self.slots[0][table[block]][slot] - self._offsets[0]) & _MASK

    def write(self, layer: int, table: Sequence[int], start: int, states: Sequence[int]) -> None:
        """Write the states of the tokens from `start` on, in one layer."""
        offset, of_layer, size = self._offsets[layer], self.slots[layer], self.block_size
        values = [(state + offset) & _MASK for state in states]
        index, first = divmod(start, size)
        while values:
            new, values = values[: size - first], values[size - first :]
            held = of_layer[table[index]]
            of_layer[table[index]] = (*held[:first], *new, *held[first + len(new) :])
            index, first = index + 1, 0

    def total(self, table: Sequence[int], end: int) -> int:
        """Return the sum of the first `end` slots over all layers, as of the first revision."""
        num_full, num_more = divmod(end, self.block_size)
        total = -end * self._of_slot
        for of_layer in self.slots:
            total += sum(map(sum, map(of_layer.__getitem__, table[:num_full])))
            if num_more:
                total += sum(of_layer[table[num_full]][:num_more])
        return total & _MASK

    @property
    def is_staged(self) -> bool:
        """Whether transfers read and write other memory than steps."""
        return self._staged is not self.slots

    def read(self, layer: int, blocks: Sequence[int]) -> Numbers:
        """Return one layer of blocks from where transfers read them.

        All are of one memory. Blocks of the host have the numbers after those of the node, as in a
        transfer.
        """
        num_blocks = len(self.slots[layer])
        if blocks[0] < num_blocks:
            of_layer = self._staged[layer]
            return [of_layer[block] for block in blocks]
        of_layer = self.host[layer]
        return [of_layer[block - num_blocks] for block in blocks]

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the host's memory."""
        return len(self.host[0])

    def of_block(self, block: int) -> Numbers:
        """Return a block in every layer, where steps read it."""
        return [of_layer[block] for of_layer in self.slots]

    def of_host_block(self, host_block: int) -> Numbers:
        """Return a block in the host's memory in every layer."""
        return [of_layer[host_block] for of_layer in self.host]

    def put(self, layer: int, blocks: Sequence[int], values: Numbers) -> None:
        """Overwrite one layer of blocks, where transfers write them."""
        of_layer = self._staged[layer]
        for block, slots in zip(blocks, values, strict=True):
            of_layer[block] = slots

    def put_host(self, host_block: int, values: Numbers) -> None:
        """Overwrite a block in the host's memory in every layer."""
        for of_layer, slots in zip(self.host, values, strict=True):
            of_layer[host_block] = slots

    def stage_in(self, blocks: Sequence[int]) -> None:
        """Copy blocks from where transfers have written them."""
        _copy(self._staged, blocks, self.slots, blocks)

    def stage_out(self, blocks: Sequence[int], layer: int | None = None) -> None:
        """Copy blocks to where transfers read them: one layer, or all."""
        every = slice(None) if layer is None else slice(layer, layer + 1)
        _copy(self.slots[every], blocks, self._staged[every], blocks)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with numbers that no step expects."""
        for of_layer in self.slots:
            for block in blocks:
                of_layer[block] = self._spoiled

    def spoil_host(self, host_blocks: Sequence[int]) -> None:
        """Overwrite blocks in the host's memory with numbers that no step expects."""
        for of_layer in self.host:
            for host_block in host_blocks:
                of_layer[host_block] = self._spoiled

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks into host memory."""
        _copy(self.slots, blocks, self.host, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks back from host memory."""
        _copy(self.host, host_blocks, self.slots, blocks)


def other_than(slots: Slots) -> Slots:
    """Return slots of which each holds another number."""
    return tuple([~number & _MASK for number in slots])


def _empty(num_blocks: int, block_size: int) -> list[Numbers]:
    return [[(0,) * block_size] * num_blocks for _ in range(NUM_LAYERS)]


def _copy(
    source: Sequence[Numbers], blocks: Sequence[int], target: Sequence[Numbers], to: Sequence[int]
) -> None:
    """Copy blocks in every layer; all are read before the first one is written."""
    for read, written in zip(source, target, strict=True):
        copied = [read[block] for block in blocks]
        for block, slots in zip(to, copied, strict=True):
            written[block] = slots
