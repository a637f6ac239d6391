"""Arguments between tags, each with its name: the text of a value, and how it is read and enforced.

The value of a text is the text as it is; other values are JSON. What a value may be follows from
its schema.

tags        the texts around names and values
kinds       what kinds of values the schema of an argument takes, and which texts
reader      arguments between tags to JSON, whatever pieces they come in
patterns    the expressions of texts that a schema takes
references  the schema of one argument with what it refers to
rules       the grammar of a tool's arguments
"""
