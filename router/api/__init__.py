"""The APIs of OpenAI and Anthropic: from a request body to tokens to an answer in its shape.

generation    the endpoints that generate: from a body to tokens to an answer
endpoints     what tells them apart: the meaning of a body, the shape of the answer
exchanges     an exchange with a client: its seat, its deadline, its end
sessions      which header names the session of a request, and whose the name is
prefix_sharing  which requests share KV: the salts of their blocks
models        `/v1/models`
tokenization  `/tokenize`, `/detokenize` and the tokens of a message
bodies/       what clients send
planning/     from a body to prompts, sampling parameters and the form of the answer
answers/      from tokens to what clients get
"""
