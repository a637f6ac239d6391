"""The HTTP edge without a cluster behind it, and clients that see every byte.

described           what the description of the API says of an answer
echo                an app that answers with what it was asked, and a client of raw bytes
edge_model          a small tokenizer with a chat template
scripted_generator  a generator that plays scripts
http_edge           the app of a router around these two
http_server         an app on a real socket, and a raw client
other_paths         other ways to write a path
posted              requests to the two endpoints of texts and chats
agents              what coding agents send, and the prompt that it becomes
read_answer         what a generator pushes, one push after the other
tool_models         models whose chat templates know tools and thinking
harmony_model       a model that answers in messages to channels
"""
