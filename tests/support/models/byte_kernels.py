"""The products with int8 rows that tests compile, as (format, whether rows are fine, instruction).

Each takes seconds: `tests.support.compiled_kernels` compiles those of everyday tests before them.
"""

from __future__ import annotations

from itertools import product

from engine.runner.kernels.products.byte_dot import available
from tests.support.models.packing import GROUPED_FORMATS

KINDS = (False, True)
"""Coarse rows and fine ones."""
EVERY = list(product(GROUPED_FORMATS, KINDS, available()))
FASTEST = list(product(GROUPED_FORMATS, KINDS, available()[:1]))
"""What models are computed with."""
FEW = [
    (name, is_fine, instruction)
    for name, first_kind in (("Q8_0", False), ("Q4_0", True))
    for index, instruction in enumerate(available())
    for is_fine in KINDS
    if (index % 2 == 0) == (is_fine == first_kind)
]
"""Each instruction with the format whose numbers are signed for it, and with another one: with fine
rows of the one, and coarse rows of the other."""
