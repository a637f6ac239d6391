"""Draws from rows of logits.

sample_rows    draws from rows of logits
filters        top-k, top-p, min-p
draw           the draw itself
withhold       takes tokens that grammars do not allow out of rows of logits
row_scan       the largest logits of a row by block, and masks of the tokens near them
top_p_weights  e^-depth of many tokens
philox         the noise of the draws
"""
