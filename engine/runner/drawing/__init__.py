"""From logits to tokens, all rows of a step at once.

sampler         from logits to tokens
token_rules     biases, bad words and allowed tokens, row by row
host_draw       draws from logits on the host
device_draw     draws with one read from a device
device_sampler  finds the tokens that can be drawn, on the device
device_noise    their noise
head_draw       draws from them exactly
verification    accepts drafts from what was drawn after each row
undrawn         why a sequence of a step has no token
prompt_scores   how likely a prompt's own tokens were

Decisions:

A device finds the tokens that can be drawn, and the host draws. Of each row of logits the likeliest
tokens come back, and with plain temperature those with the largest noise, which the device computes
from the same Philox words. All rows of a step are read at once. The host repeats penalties, filters
and the draw on these candidates in its own arithmetic, so the token is the one that it draws from
the whole row. The whole row is read for log probabilities, for filters that keep more than 512
tokens, and where rounding on the device could decide.
"""
