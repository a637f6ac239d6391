"""What no answer could end under, because it holds itself.

endless_parts   parts of JSON schemas of which no value has an end
endless_rules   rules of Lark grammars of which no text has an end
"""
