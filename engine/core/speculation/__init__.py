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

Decisions:

Drafts are verified only where they raise the tokens per second. At start the runner measures, in at
most three seconds unless the model is slow, the cost of a step of 1, 2, 4 … rows up to the widest
decode, and the cost of a proposal. Every step that runs corrects this curve, by all of its rows,
those of prompt chunks too. Each step takes the drafts, over all sequences, that raise the expected
tokens per second: many on a narrow batch, none on a wide one, none for a sequence whose drafts keep
failing.

A draft's estimated chance is discounted. In a batch whose requests arrived together, only gains of
all sequences end the batch sooner; a token gained by one sequence saves its row in a later step.
Chances count for 0.7 of their estimate. This leaves out drafts that would gain almost nothing, and
wide batches do not become slower.
"""
