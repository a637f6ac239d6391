"""The compiler that most tests of this folder share."""

from __future__ import annotations

import pytest

from grammars.compiler import GrammarCompiler
from tests.support.http.edge_model import grammars_of, tiny_model


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return grammars_of(tiny_model())
