"""Bodies of Anthropic's `/v1/messages` as chats.

request       from a body to the body of a chat
conversation  messages and their blocks as turns of a chat
"""
