"""The tokens that grammars allow.

compiling       compiles grammars before their requests get a seat
masks           which tokens grammars allow, found while the layers compute
held_matcher    the matcher of a seat, which follows its output
unmasked_rows   rows that are drawn without a mask and then checked
allowed_tokens  masks of allowed tokens
"""
