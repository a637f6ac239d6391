"""`pdserve profile`: settings as of a node in, a file of measured times out."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from common.control_group import num_cores
from common.errors import ConfigError, PdserveError
from common.files.cache_folder import cache_root, full_path
from common.kv.kv_layout import KVLayout
from common.kv.token_budget import tokens_per_seq
from common.measured_profile import (
    MeasuredProfile,
    ProfiledMachine,
    ProfiledModel,
    encode_profile,
)
from common.settings.config import Config
from common.version import VERSION
from engine.core.step.step_batch import StepBatch
from node.life.make_scheduler import max_chunk_tokens_of, speculation_of
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.checkpoints.speculative_model import resolve_speculation
from pdserve.profiling.served_times import (
    ServedTimer,
    ServedTimes,
    StreamAsker,
    computed_s,
)

DECODES_S, CHUNKS_S, VERIFIED_S = 18.0, 22.0, 6.0
MOST_BYTES = 64 << 20
"""KV that the largest transfer moves."""
TOUCHED_BYTES = 2 << 30
"""KV cache that steps read: more than the caches of a processor hold, and quickly allocated."""


class ProfiledRunner(Protocol):
    """A loaded model, as it is measured on this machine."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def attention_backend(self) -> str: ...

    def execute(self, batch: StepBatch) -> object:
        """Run one step."""


def run_profile(
    config: Config,
    path: Path,
    load: Callable[[Config], ProfiledRunner],
    serve: Callable[[Config], ServedTimes],
) -> None:
    """Measure what `serve` finds on a cluster and then what `load` returns, warm; write the file at
    `path`, a `checked_path`.

    Raises what a node raises that cannot load its model, and `ConfigError` for a file that cannot
    be written now; then the profile is printed.
    """
    folder = resolve_checkpoint(config.model.model)
    name = config.model.served_model_name or folder.name
    model = replace(config.model, model=str(folder), served_model_name=name)
    config = replace(config, model=model)
    served = serve(config)
    tell(f"loading {name}")
    with redirect_stdout(sys.stderr):
        runner = load(config)
    profile = measured(config, runner, name, served)
    text = encode_profile(profile)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text)  # it took minutes
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}: the profile is in the output instead"
        ) from None
    found = (
        f"{len(profile.decodes)} decodes, {len(profile.chunks)} chunks, "
        f"{len(profile.verified)} steps with drafts, {len(profile.transfers)} transfers"
    )
    print(f"{path}: {found}")


def checked_path(file: str) -> Path:
    """Return the file's path. Raises `ConfigError` where nothing can be written."""
    path = full_path(file)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: wanted the name of a file to write")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist: wanted a file in a folder that does")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: wanted a file that this user may write")
    return path


def tell(line: str) -> None:
    """Show what is being done, beside the output."""
    print(f"profile: {line}", file=sys.stderr, flush=True)


def loaded_runner(config: Config) -> ProfiledRunner:
    """Return the runner of a mixed node, warm. Raises what a node raises at its start.

    Its KV cache is in memory that other nodes can read, as that of a node is. Private memory may
    have larger pages, in which long contexts are read faster: 8 rows at 4,096 tokens by a seventh.
    """
    from engine.runner.start.load import load_model_runner
    from pdserve.roles.kv_plane import KVPlane

    runner = load_model_runner(
        config.model,
        config.engine,
        speculation=resolve_speculation(
            speculation_of(config), Path(config.model.model), load_format=config.model.load_format
        ),
        max_chunk_tokens=max_chunk_tokens_of(config),
        host_memory=KVPlane(config).host_memory,
        packed_folder=cache_root() / "packed",
    )
    tell("compiling, warming up")
    runner.warm_up()
    return runner


def served_times(config: Config) -> ServedTimes:
    """Return the times of a cluster on this machine; none where no cluster starts."""
    from pdserve.profiling.own_cluster import own_cluster

    tell("starting a router, a prefill node and a decode node")
    try:
        with own_cluster(config) as cluster:
            url = cluster.url
            computed = partial(computed_s, url)
            return ServedTimer(StreamAsker(url), tell, computed, cluster.mix_roles).measure()
    except PdserveError as error:
        tell(f"what a cluster takes beside its steps is left out: {error}")
        return ServedTimes()


def measured(
    config: Config, runner: ProfiledRunner, name: str, served: ServedTimes
) -> MeasuredProfile:
    """Return the profile of a runner that is warm, with the times of a cluster."""
    from pdserve.profiling.step_times import StepBounds, StepTimer
    from pdserve.profiling.transfer_times import transfer_times

    layout, speculation = runner.layout, speculation_of(config)
    bounds = StepBounds(
        max_tokens=max_chunk_tokens_of(config),
        max_len=runner.max_model_len,
        num_blocks=runner.num_blocks,
        block_size=layout.block_size,
        max_rows=config.engine.max_num_seqs,
        most_touched=max(1, TOUCHED_BYTES // layout.block_bytes),
        vocab_size=runner.vocab_size,
    )
    timer = StepTimer(runner.execute, bounds, tell)
    most_tokens = tokens_per_seq(speculation.speculative_method, speculation.num_speculative_tokens)
    return MeasuredProfile(
        pdserve_version=VERSION,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=ProfiledModel(
            name=name,
            layout=layout.fingerprint,
            kv_bytes_per_token=layout.block_bytes // layout.block_size,
            block_size=layout.block_size,
            max_model_len=runner.max_model_len,
        ),
        machine=ProfiledMachine(
            processor=processor_name(),
            num_cores=num_cores(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            device=runner.device,
            back_end=runner.attention_backend,
            num_blocks=runner.num_blocks,
        ),
        decodes=timer.decodes(DECODES_S),
        chunks=timer.chunks(CHUNKS_S),
        verified=timer.verified(most_tokens, VERIFIED_S),
        transfers=transfer_times(layout, tell, MOST_BYTES),
        streamed=served.streamed,
        first_tokens=served.first_tokens,
        second_tokens=served.second_tokens,
    )


def processor_name() -> str:
    """Return the processor's name as Linux has it; elsewhere its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
