"""Draws on the card.

card_draw        the draws of a step: which launches, and which rows the host draws
going_on         decoding steps, each of which begins before the last one's tokens are read
left_rows        logits of the rows that the host draws
staged_rules     inputs of draws, sent with the rows of the next step
filter_launches  the launches of draws under filters
mask_launches    masks as bits, and their launch
edit_launches    biases, penalties and withheld tokens, and their launches
card_logprobs    log probabilities, and their launches
"""
