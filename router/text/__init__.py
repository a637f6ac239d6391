"""The text side of a model. No weights, no tensors.

text_model       tokenizer, chat template and limits of the model that the cluster serves
model_files      the small files of a checkpoint folder
special_text     special tokens that a user wrote are text
conversation     the chat side of a model: its templates, its tools, whether it thinks
chat_template    a chat template, rendered in a sandbox
system_messages  messages of the system that a template does not take
context_limits   the longest prompt and output, and the errors for longer ones
token_lookup     the bytes and the text of a single token
detokenizer      token ids to text, a few at a time
stop_strings     stop strings in text that arrives in pieces
stop_search      where in a choice they are searched: its text, after its first tokens
choice_text      one choice: tokens in, text to send out
logprobs_json    log-probabilities in OpenAI's two shapes
prompt_tokens    log probabilities of a prompt, as entries of its echo
usage            the tokens of one request, counted
"""
