"""OpenAI's harmony format, of gpt-oss: answers are messages to channels, with headers. Pure.

tags         its tags, and the marks that stand for them in an answer's text
header       what the header of a message says
message_cut  an answer's text cut into messages: thinking, text for the user, and calls
reading      the parts of an answer, and the tokens of its thinking
grammar      grammars of answers
history      earlier messages, tools and efforts as the templates of these models take them

An answer is read by its tokens: a tag that a model spells with other tokens is text. Nothing that a
model writes is an error, and of headers and tags nothing is shown.
"""
