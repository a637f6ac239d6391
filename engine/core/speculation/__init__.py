"""Speculation: drafts for decoding sequences, verified by the model, so never part of an answer
that the model would not give.

    speculation       one node's speculation: which drafts each sequence verifies in a step
    drafter           the contract of a drafter
    ngram             drafts by prompt look-up
    suffix            drafts by suffix decoding, over this request and recent ones
    own_text          one sequence's known tokens, searched
    suffix_index      where the end of a text occurred before
    match_confidence  how likely a looked-up token is right
    draft_length      how many drafts pay
"""
