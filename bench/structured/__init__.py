"""What grammars cost: `python -m bench.structured`.

schemas  JSON schemas to answer by
"""
