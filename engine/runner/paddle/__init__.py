"""The decoder in Paddle's operators, on any device that Paddle has.

back_end          what this package is to the runner; a GPU's memory, as Paddle counts it
decoder           a decoder's three parts in operators
attention         attention in plain operators, the reference
tiled_attention   the same in tiles, as `attention_tiles` plans it
attention_tiles   which tiles a step's attention has
mtp               a drafting layer in operators
device_arrays     a step's index arrays, sent to the device in one copy

Decisions:

Attention is a running softmax over tiles of keys. The borders of tiles depend on positions alone,
so a row's sums have one order in every batch, and memory is bounded by a tile. All sequences of a
step are attended in a few calls per layer: block tables, masks and row numbers are sent once per
step.
"""
