"""From tokens to what clients get.

answer                 the sink of all choices of a request, on its way to its client
chat_and_completions   OpenAI's two shapes of an answer, streamed and whole
chat_parts             the answer of a chat that thinks or calls functions
items                  an answer as a list of items: thoughts, texts and calls
responses              these as events and answers of `/v1/responses`
messages               these as events and answers of Anthropic's `/v1/messages`
json_parts             JSON of what may be long, in parts: log probabilities, token ids
shapes                 answers and events of all endpoints, for `/openapi.json`
"""
