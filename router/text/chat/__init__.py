"""Conversations to prompts.

conversation     the chat side of a model: its templates, its tools, whether it thinks
chat_template    a chat template, rendered in a sandbox
efforts          efforts of thinking that a template does not take
system_messages  messages of the system that a template does not take
turn_taking      messages in a row that a template does not take
"""
