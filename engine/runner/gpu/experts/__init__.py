"""Layers with a mixture of experts, on a card (`kernels/experts` has the kernels).

    expert_launches  a mixture's launches, behind the norm of its input
    expert_tiles     the tiles of the experts' products

Decisions:

Products with the gate of the experts are float32 sums that nothing rounds: in bfloat16, experts
whose products differ by less than a 256th would be chosen by their numbers. A gate that a file has
in another type than bfloat16 is three matrices in bfloat16, whose sum has every bit of its float32
weights: a product's inputs are in bfloat16, so each of the three products is exact up to the matrix
unit's own rounding.

A row's bits depend neither on the rows beside it nor on what an expert is sent. Experts have no
capacity, pairs are counted and not sorted by atomic operations, and a row's results are added by
one program in ascending order of the experts. An expert's results are rounded to bfloat16 before
that, as those of every product are.

Rows of padding are sent to no expert: a step of 3 rows in a graph for 4 reads no expert's weights
for the fourth.
"""
