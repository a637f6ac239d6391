"""Numbers of JSON schemas that the compiler has otherwise than they are meant.

exact_numbers   which numbers mean themselves
number_ranges   bounds with fractions, of which the compiler misses some numbers
multiples       multiples of fractions, of which it misses some
"""
