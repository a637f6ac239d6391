"""Triton kernels of a decoder. Each file is one phase of a layer; `launcher` compiles them.

    products        weights times rows; stored_weights: how weights are read, by their form
    attention       pieces of keys at fixed positions, merged in order
    rows            embedding, norms, rotation, keys and values into the cache
    draw            the next token, and the state of the next step
    gathering       rows and KV blocks that do not lie together
    ordering        programs that start while the kernel before still runs
    random_numbers  random weights

Every product is `W @ x.T`, summed over the whole of K by one chain of matrix instructions, so the
bits of a row depend neither on how many rows there are nor on the tile.
"""
