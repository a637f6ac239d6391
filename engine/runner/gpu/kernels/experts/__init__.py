"""Triton kernels of mixtures of experts.

    choice            each row's experts and their weights; the sum of the experts' results
    listing           pairs of a row and an expert, listed by expert, in tiles
    grouped_products  weights of many experts in bfloat16 times the rows that are sent to each
    grouped_ranges    the same with quantised weights

A pair is a row and one of its experts: pair number `row * chosen + slot`, slots in ascending order
of the experts. A row's results depend neither on the tile that its pair is in nor on what else is
in it: each is one chain over the inputs, and the sum over a row's experts has a fixed order.
"""
