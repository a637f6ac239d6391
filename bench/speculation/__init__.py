"""What drafts gain: `python -m bench.speculation`.

prompts  three kinds of prompts
"""
