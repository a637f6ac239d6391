"""`bench.engine.sampling` draws in every way that it names."""

from __future__ import annotations

from bench.engine.sampling import WAYS, Case, measure, rows_of


def test_every_way_is_measured() -> None:
    case = Case(300, 3)
    figures = measure(case, 1)
    assert list(figures) == [f"v300_r3.{way}_ms" for way in WAYS]
    assert all(value >= 0 for value in figures.values())


def test_rows_are_drawn_as_their_way_says() -> None:
    rows = rows_of(Case(300, 3), "penalties")
    assert rows.ways["repetition_penalty"].tolist() == [1.1] * 3
    assert rows.ways["seed"].tolist() == [0, 1, 2]
    assert rows.num_tokens.tolist() == [202] * 3
    assert rows.output_indices.tolist() == [2] * 3
