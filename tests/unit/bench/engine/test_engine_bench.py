"""The figures of bench.engine: one name each, and a peer that is asked only what it can answer."""

from __future__ import annotations

from itertools import count

from bench.engine.__main__ import MEASURES, key_of, run


def test_every_measure_has_a_name_of_its_own() -> None:
    keys = [key_of(*measure) for measure in MEASURES]
    assert len(set(keys)) == len(MEASURES)
    assert {"decode_tok_s_32", "sampled_tok_s_32", "penalised_tok_s_32"} <= set(keys)
    assert {"decode_tok_s_1_at_6000", "prefill_tok_s_1024"} <= set(keys)


def test_the_first_round_does_not_count_and_the_peer_only_decodes_and_prefills() -> None:
    asked: list[tuple[str, str]] = []
    values = count(1)

    def engine(kind: str, num_sequences: int, context: int) -> float:
        asked.append(("pdserve", kind))
        return next(values)

    def peer(kind: str, num_sequences: int, context: int) -> float:
        asked.append(("transformers", kind))
        return 1.0

    figures = run({"pdserve": engine, "transformers": peer}, 1)
    assert set(figures["pdserve"]) == {key_of(*measure) for measure in MEASURES}
    assert min(figures["pdserve"].values()) == len(MEASURES) + 1
    assert {kind for name, kind in asked if name == "transformers"} == {"decode", "prefill"}
    assert "sampled_tok_s_32" not in figures["transformers"]
