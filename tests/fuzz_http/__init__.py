"""A fuzzer of the HTTP port: routes, headers, bodies, schemas and grammars, at a real cluster.

values     numbers, texts and JSON that parsers disagree on, and changes of a valid value
schemas    JSON schemas of keywords that are combined at random
grammars   Lark, GBNF and regular expressions of fragments
bodies     valid bodies of every endpoint, some of them changed
cases      whole requests as bytes: heads, framing, how the client ends; a file of them
answers    reads what a case is answered, and says what is wrong with it
bounds     what the processes may hold meanwhile and at the end
"""
