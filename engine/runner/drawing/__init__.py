"""From logits to tokens, all rows of a step at once.

sampler         from logits to tokens
token_rules     biases, bad words, and the only tokens that a row may draw
draws           draws after each row of a step, from logits on the host; accepts drafts
undrawn         why a sequence of a step has no token
prompt_scores   how likely a prompt's own tokens were
"""
