"""`pdserve.example.toml` shows every setting with its true default and help."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.configuration.config_sources import load_config
from pdserve.configuration.options import all_options
from tools.generate_example_file import EXAMPLE, example_text


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


def test_it_is_what_the_declared_settings_give() -> None:
    assert EXAMPLE.read_text() == example_text()


def test_it_names_and_explains_every_setting() -> None:
    text = EXAMPLE.read_text()
    for option in all_options().values():
        assert re.search(rf"^# \w.*\n# {option.key} = ", text, flags=re.MULTILINE), option.key
