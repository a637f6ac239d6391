"""The decoder in Paddle's operators, on any device that Paddle has.

decoder           a decoder's three parts in operators
attention         attention in plain operators, the reference
tiled_attention   the same in tiles, as `attention_tiles` plans it
attention_tiles   which tiles a step's attention has
fused_attention   attention by a fused operator of a GPU
fused_check       refuses fused operators that differ from the plain ones
device_arrays     a step's index arrays, sent to the device in one copy
"""
