"""The decoder in Paddle's operators, on any device that Paddle has.

back_end          what this package is to the runner
decoder           a decoder's three parts in operators
attention         attention in plain operators, the reference
tiled_attention   the same in tiles, as `attention_tiles` plans it
attention_tiles   which tiles a step's attention has
mtp               a drafting layer in operators
memory_meter      a GPU's memory, as Paddle's allocator counts it
device_arrays     a step's index arrays, sent to the device in one copy
"""
