"""Anthropic's `/v1/messages` as a translation: of a request into a chat, and of its answer.

request       from a body to the body of a chat
conversation  messages and their blocks as turns of a chat
answer        events about content blocks, and the whole message
"""
