"""The OpenAI API: from a request body to tokens to an answer in OpenAI's shape.

api                 the endpoints that generate: from a body to tokens to an answer
endpoints           what tells them apart: the meaning of a body, the shape of the answer
body_encoding       the encoding of a body: UTF-8, and no other
schemas             the request bodies, and what becomes of every field
json_limits         bounds on a body's structure, checked before it is parsed
unknown_fields      fields that the server does not know: a warning each, or a refusal
left_out            parts that the server does not have and agents always send: the same
checked_fields      bounds of fields, and fields that go together
token_dead_ends     rules about tokens that leave none to draw
prompts             prompts as token ids
seeds               the seeds of a request's choices
request_plan        from a parsed body to prompts and sampling parameters
response_format     from the fields that constrain an answer to its grammar
planning            where a body is planned: on the event loop, a thread, or by another process
planning_process    the router's side of that process: its queue, its starts and ends
planning_child      what runs in that process
planning_messages   what travels between the two: bodies, plans, errors
described_answers   answers, events and errors as JSON schemas, for `/openapi.json`
tokenization        `/tokenize`, `/detokenize` and the tokens of a message
tool_fields         the fields about tools: which there are, which may be called
answer_syntax       what an answer may hold (thinking, calls), and its grammar
translations        requests of other APIs as chats
client_tools        tools that a client knows as something else than a function
places              where their clients wrote the parts of these chats, for errors
responses/          `/v1/responses`
messages/           Anthropic's `/v1/messages`
chat_messages       chat messages as chat templates expect them
answer              the sink of all choices of a request, on its way to its client
prompt_logprobs_json  log probabilities of a prompt, in vLLM's shape
turns               long work on the event loop: one piece in a turn, whosever it is
json_parts          JSON of what may be long, in parts
formats             the two shapes of an answer, streamed and whole
chat_parts          the answer of a chat that thinks or calls functions
items_format        an answer as a list of items: thoughts, texts and calls
"""
