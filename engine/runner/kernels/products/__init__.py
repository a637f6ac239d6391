"""Products with packed weights of any stored format.

linear         products with packed weights, chosen by the address of their kernel
packed         stored weights as panels in one piece of memory
block_layout   a panel's bytes
panel_product  rows times panels of floats
block_product  rows times panels of blocks, widened in registers
tile_product   two unpacked operands
byte_product   int8 rows times panels of blocks
byte_dot       by which instruction
byte_rows      rows in int8
"""
