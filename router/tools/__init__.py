"""Tool calls and thinking as text: what models write, and what clients get. Pure.

parts           the parts of an answer: thinking, text, calls
definitions     the tools of a request, and which of them it may, or must, call
call_format     what a format is: the texts around the names and the arguments of calls
tagged          arguments between tags, as of Qwen3-Coder: their kinds, their JSON, their grammar
harmony         answers that are messages to channels, as of gpt-oss
fenced          a format that any instruct model can follow, with the text that explains it
formats         all formats by name, and which one a template uses
call_head       the text of a call up to its arguments, matched character by character
json_extent     where a JSON object in a text ends
text_argument   the text of a call's one argument, for tools that take text
call_parser     an answer's text to text and calls
thinking        where an answer's thinking begins and ends, and its tokens
stop_scope      the part of an answer in which stop strings are searched, by both
answer_parser   the parts of an answer, by both
grammars        grammars of answers that hold calls, and of answers after thinking
earlier_calls   which form of earlier calls a chat template takes
plain_messages  calls and their results as plain messages, for templates that know neither
"""
