"""The tokens of an answer to text, and their counts.

choice_text    one choice: tokens in, text to send out
detokenizer    token ids to text, a few at a time
stop_strings   stop strings in text that arrives in pieces
stop_search    where in a choice they are searched: its text, after its first tokens
logprobs_json  log-probabilities in OpenAI's two shapes
prompt_tokens  log probabilities of a prompt, as entries of its echo
usage          the tokens of one request, counted
"""
