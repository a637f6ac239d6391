"""Speculation: drafts for decoding sequences, verified by the model, so never changing an answer.

speculation       one node's speculation: which drafts each sequence verifies in a step
drafter           the contract of a drafter
ngram             drafts by prompt look-up
suffix            drafts by suffix decoding, over this request and recent ones
own_text          one sequence's known tokens, and matches of their end among them
suffix_index      an index of where the end of a text occurred before
match_confidence  the chance that a looked-up token is right
draft_length      the number of drafts that pay
step_curve        what a step costs by its rows, corrected by the steps that ran
"""
