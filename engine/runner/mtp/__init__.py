"""Drafting with a multi-token-prediction (MTP) layer, one more decoder layer behind the model's.

At position i it takes the hidden state h_i after the model's final norm and the embedding of token
i + 1, and predicts token i + 2:

    x_i = projection(concat(norm(embed(token i + 1)), norm(h_i)))
    m_i = layer(x_i), causal over x_0 … x_i, with the model's rotary positions
    draft = argmax(head · norm(m_i))

For the next draft, one position on, m_i (or its norm, depending on the checkpoint) replaces h, and
the draft replaces the token. DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.

    mtp_weights  finds the layer in a checkpoint or a file
    draft_step   which rows it computes after a step, and the drafts that follow
    draft_source its weights in 8 bits, as they are packed for the kernels

The layer itself is in the back ends, beside their decoders.

Decisions:

`mtp` also looks up. The proposals of the layer and of a look-up in the request are compared by
their expected number of accepted tokens, and the better ones are verified. The layer's acceptance
estimate is updated by its own drafts only. Where a text copies itself, this brings `mtp` close to
`ngram`; the layer's own work, about a hundredth of a step, remains.

The weights of a drafting layer are stored in bytes. The time of a step of few rows is the time to
read its weights. The CPU kernels therefore round the weights of the MTP layer and of its own head
to Q8_0: one byte each and a scale for 32 of them, about a quarter of the traffic. Rows that are not
whole groups of 32 stay float32. Drafts may differ because of it; the model's own weights are not
rounded.

The KV of the multi-token-prediction layer is one more layer of the cache. It is computed wherever a
position's next token is known, travels with the prompt, and is swapped and prefix-cached with its
block. The last slot of a block depends on the token after it, so after a prefix hit it may belong
to another continuation. That can cost a draft and never changes an answer. Nodes with and without
the layer have different fingerprints and do not exchange blocks.
"""
