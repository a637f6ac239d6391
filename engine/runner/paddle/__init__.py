"""The decoder in Paddle's operators, on any device that Paddle has.

decoder           a decoder's three parts in operators
attention         attention in plain operators, the reference
tiled_attention   the same in tiles, as `attention_tiles` plans it
attention_tiles   which tiles a step's attention has
fused_attention   attention by a fused operator of a GPU
fused_check       refuses fused operators that differ from the plain ones
device_arrays     a step's index arrays, sent to the device in one copy

Decisions:

On a GPU every sequence of a step is attended in a few calls per layer. Block tables, masks and row
numbers are sent once per step. Decoding rows and the rows that verify drafts go through Paddle's
paged operator, each row as a sequence of its own, so drafts change no bit of the rows before them.
Its maxima are passed in, because it would otherwise wait for the device twice per layer. Chunks go
through variable-length flash attention over gathered keys. At start both operators are compared
with plain ones over several blocks; one that differs is not used. The plain operators compute a
running softmax over tiles of keys, whose borders depend on positions alone, so a row's sums have
one order in every batch and memory is bounded by a tile. On a CPU the operators are played by
fakes; none of this has been run on a GPU.
"""
