"""`pdserve profile`: from settings to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.measured_profile import StreamedTime, read_measured_profile
from common.nodes import Role
from common.settings.config import Config, EngineConfig, ModelConfig, SpeculationConfig
from engine.core.runner_contract import ScheduledSequence
from pdserve.cli import main
from pdserve.local_cluster.local_cluster import LocalClusterError
from pdserve.profiling import own_cluster, profile_command
from pdserve.profiling.served_times import ServedTimes
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16"
)
STREAMED = StreamedTime(rows=1, context=500, beside="", step_s=0.01)


class Played:
    """A runner without a model."""

    layout = LAYOUT
    num_blocks = 500
    max_model_len = 4000
    vocab_size = 32_000
    device = "a card"
    attention_backend = "played"

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        self.num_steps += len(batch) > 0


def test_a_model_is_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DECODES_S", "CHUNKS_S", "VERIFIED_S"):
        monkeypatch.setattr(profile_command, name, 5.0)
    monkeypatch.setattr(profile_command, "MOST_BYTES", 1 << 18)
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    config = Config(
        role=Role.MIXED,
        model=ModelConfig(model=str(folder)),
        engine=EngineConfig(max_num_seqs=4),
        speculation=SpeculationConfig(speculative_method="ngram"),
    )
    path, runner = tmp_path / "profile.json", Played()
    asked: list[Config] = []

    def load(wanted: Config) -> Played:
        asked.append(wanted)
        return runner

    def serve(served: Config) -> ServedTimes:
        assert not asked, "the runner takes its memory later"
        assert served.model.served_model_name == "llama"
        return ServedTimes((STREAMED,))

    profile_command.run_profile(config, path, load, serve)
    profile = read_measured_profile(path, model="llama")
    assert asked[0].model.model == str(folder)
    assert {one.rows for one in profile.decodes} == {1, 2, 4}, "no more than the seats"
    assert {one.context for one in profile.chunks} == {0, 1024}
    assert profile.verified[0].tokens_per_sequence > 1
    assert profile.streamed == (STREAMED,)
    assert {one.transport for one in profile.transfers} == {"zmq", "shm"}
    machine, model = profile.machine, profile.model
    assert (machine.device, machine.back_end, machine.num_blocks) == ("a card", "played", 500)
    assert machine.processor
    assert machine.num_cores >= 1
    assert model.layout == LAYOUT.fingerprint
    assert model.kv_bytes_per_token * LAYOUT.block_size == LAYOUT.block_bytes
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{path}: ")
    assert "profile: decode of 1 rows" in printed.err

    asked.clear()
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left on device"):
        profile_command.run_profile(config, Path("/dev/full"), load, serve)
    path.write_text(capsys.readouterr().out)
    assert read_measured_profile(path, model="llama").model == model, "it is not lost"


def test_where_no_cluster_starts_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(config: Config) -> NoReturn:
        raise LocalClusterError("redis is not installed")

    monkeypatch.setattr(own_cluster, "own_cluster", none)
    assert profile_command.served_times(Config(role=Role.MIXED)) == ServedTimes()
    assert "is left out: redis is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "FILE"),
        (
            ["no/such/folder/file.json", "--model", "m"],
            "does not exist: wanted a file in a folder that does",
        ),
        (["no/such/folder/file.json"], "no/such/folder does not exist: wanted a file"),
        ([".", "--model", "m"], "is a folder: wanted the name of a file to write"),
        (["p.json", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["p.json", "--max-num-seq", "1"], "unknown flag --max-num-seq"),
        (
            ["p.json", "--model", "m", "--swap-space", "1GiB"],
            "--swap-space changes nothing in `pdserve profile`: wanted settings of",
        ),
        (["p.json", "--model", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) in (1, 2)
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_help_shows_the_settings_that_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--help=all"])
    text = capsys.readouterr().out
    assert text.startswith("usage: pdserve profile FILE [flags]\n")
    assert "--max-num-batched-tokens" in text
    assert "--speculative-method" in text
    assert "--redis-url" not in text
