"""Triton kernels of a decoder. Each file is one phase of a layer; `launcher` compiles them.

    products        weights in bfloat16 times rows
    ranged_products quantised weights times rows; stored_weights: how they are read
    slots           the stored form of a token's keys and values in a head, written and read
    attention       pieces of keys at fixed positions, merged in order
    rows            embedding, norms, rotation, keys and values into the cache
    experts/        mixtures of experts: choice, pairs by expert, products, sums
    draw            the next token, and the state of the next step
    filters         the next token under top-k, top-p and min-p
    withholding     tokens that a row may not draw, taken out of its logits
    edits           biases, penalties and withheld tokens, before a draw
    likeliest       sums and likeliest tokens for log probabilities
    gathering       scattered rows and KV blocks
    ordering        programs that start while the kernel before still runs
    random_numbers  random weights

Every product is `W @ x.T`. Its order of sums is fixed by the weights' shape and form, so the bits
of a row depend neither on how many rows there are nor on the tile.
"""
