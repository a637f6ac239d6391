"""Grammars of answers: their texts, their bounds, and matchers of tokens, by llguidance.

Routers check grammars with it before a request goes on, and nodes draw under them. Both compile the
same text with the same options.

- `bounds`: what of a schema is counted before it is compiled
- `trying`: grammars are tried in processes of their own, with limits
- `kept`: what is compiled and kept, bounded by what it weighs, as `heap` measures it
- `own_stack`: a stack of a known size
- `texts`: every kind of grammar as Lark text; choices; white space
- `gbnf`: llama.cpp's form of grammars, and its translation to Lark
- `schema_walk`: the parts of a schema, and its references; `dates`: dates of the calendar in them
- `numbers`: numbers that the compiler has otherwise; `nothing_asked`: keywords that ask for nothing
- `look_around`: known patterns with look-around, without it
- `endless`: parts of schemas and rules of grammars of which nothing has an end
- `one_of`: choices that exclude each other
- `weaker_schemas`: what is left out of a tool's schema that is not strict
- `places`: where in a schema a problem is
- `parts`: what a grammar was written from
- `compiler`: from a grammar and a tokenizer to a matcher, within limits; what is kept

Decisions:

JSON has one form, on one line, with a space after each comma and colon. Optional white space lets
a small model fill an answer with blanks; servers that allow it have to stop such answers. With one
form the text between two values is forced, which costs no step where drafts pay.
"""
