"""`pdserve.example.toml` shows every setting with its true default and help."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.configuration.config_sources import load_config
from pdserve.configuration.options import all_options

EXAMPLE = Path(__file__).resolve().parents[4] / "pdserve.example.toml"


def test_uncommented_it_is_the_default_configuration(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    path = tmp_path / "pdserve.toml"
    path.write_text(text.replace('\nmodel = ""', '\nmodel = "m"'))
    given = load_config({"config": str(path)}, [], {})
    assert given.config == load_config({"role": "mixed", "model": "m"}, [], {}).config
    assert all(origin.startswith("file ") for origin in given.origins.values())


def test_as_it_is_it_sets_nothing() -> None:
    flags = {"role": "mixed", "model": "m"}
    assert load_config({**flags, "config": str(EXAMPLE)}, [], {}).config == (
        load_config(flags, [], {}).config
    )


def test_it_explains_every_setting() -> None:
    text = EXAMPLE.read_text()
    for option in all_options().values():
        assert f"# {option.help}\n# {option.key} = " in text, option.key
