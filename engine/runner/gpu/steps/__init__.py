"""Steps of a decoder on a card.

step_rows    how a step's rows lie on the card
staging      a step's numbers on their way there
step_memory  the buffers of a step
decode_step  one row of many sequences: a graph from the rows to their tokens
chunk_step   many rows of a few sequences, for measurements
"""
