"""Draws from rows of logits.

sample_rows    draws from rows of logits
filters        top-k, top-p, min-p
draw           the draw itself
withhold       takes tokens that grammars do not allow out of rows of logits
row_scan       the largest logits of a row by block, and masks of the tokens near them
top_p_weights  e^-depth of many tokens
philox         the noise of the draws

Decisions:

All rows of a step are sampled in one call. Drafts stand after the known tokens of their row, so
the rows that verify them are drawn with the others, each with its own history and output index, and
the acceptance looks at the result afterwards. Each thread draws whole rows. A row is read once from
memory, for the largest logit of each block of 64, and then from the cache, and while it is computed
the thread brings its next row there. Filters look at the few tokens near the likeliest one first,
so most blocks are passed over. A draw from a whole row looks at the logits of 256 tokens only if
the largest of them, with the largest word of their noise, could win. The weights e^-depth are
computed by a fixed algorithm instead of the machine's library, so a row's draw is the same
everywhere.
"""
