"""Drafting with a multi-token-prediction (MTP) layer, one more decoder layer behind the model's.

At position i it takes the hidden state h_i after the model's final norm and the embedding of token
i + 1, and predicts token i + 2:

    x_i = projection(concat(norm(embed(token i + 1)), norm(h_i)))
    m_i = layer(x_i), causal over x_0 … x_i, with the model's rotary positions
    draft = argmax(head · norm(m_i))

For the next draft, one position on, m_i (or its norm, depending on the checkpoint) replaces h, and
the draft replaces the token. DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.

The layer's keys and values are one more layer of the KV cache. A slot depends on the token after
it, and so the last slot of a block depends on the token after the block: after a prefix hit it may
hold the KV of another continuation. That can change drafts but never answers, since every draft is
verified.

    mtp_weights  finds the layer in a checkpoint or a file
    draft_step   which rows it computes after a step, and the drafts that follow
    draft_source its weights in 8 bits, as they are packed for the kernels

The layer itself is in the back ends, beside their decoders.
"""
