"""Steps of a decoder on a card.

step_rows    the order of a step's rows on the card
staging      a step's numbers, sent from pinned memory
step_memory  the buffers of a step
piece_lists  which pieces of keys its decoding rows see
decode_step  one row of many sequences: a graph from the rows to their tokens
chunk_step   many rows of a few sequences, for measurements
"""
