"""The text side of a model. No weights, no tensors.

text_model      tokenizer, chat template and limits of the model that the cluster serves
model_files     the small files of a checkpoint folder
special_text    special tokens that a user wrote are text
context_limits  the longest prompt and output, and the errors for longer ones
token_lookup    the bytes and the text of a single token
chat/           conversations to prompts
output/         the tokens of an answer to text, and their counts
"""
