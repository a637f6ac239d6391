"""What clients send: bodies, read and checked.

json_text         the JSON of a body: its encoding, and bounds on its structure
schemas           the request bodies, and what becomes of every field
unknown_fields    fields and parts that the server does not have: a warning each, or a refusal
asked             what a body of any API asks for: to answer, to sample, to output, to show
tool_fields       the fields about tools: which there are, which may be called
response_format   from the fields that constrain an answer to its grammar
chat_messages     chat messages as chat templates expect them
thinking          whether a chat asks the model to think, how hard, and for how long
client_tools      tools that a client knows as something else than a function
thought_codes     what a model thought, in the form in which clients send it back
messages/         bodies of Anthropic's `/v1/messages` as chats
responses/        bodies of `/v1/responses` as chats
places            where clients of these wrote the parts of a chat, for errors
"""
