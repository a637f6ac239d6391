"""A decoder's weights, repacked once for the CPU kernels into a file that all nodes share.

The file has a header of one page, then one packed weight after another (`kernels.packed`). Its name
is a digest of what is packed, and of the form in which it is. It is mapped read-only, so nodes of a
machine share one copy in its page cache. A file that is cut off, or holds other bytes than were
written, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from common.files.cache_folder import build_once, rebuild
from engine.runner.cpu.weight_memory import WeightMemory
from engine.runner.kernels.products import group_layout, packed
from engine.runner.kernels.products.packed import (
    Bytes,
    FormatAndShape,
    PackedWeight,
    pack_into,
    packed_bytes,
    packed_view,
)
from engine.runner.weights import gguf_weights, rope, stored_formats
from engine.runner.weights.derived import (
    fused_experts,
    fused_weights,
    quantised_source,
    rotary_order,
)
from engine.runner.weights.schemes import float8_scheme, integer_formats, integer_schemes
from engine.runner.weights.spec.decoder_tensors import EXPERT_GATE, SHARED_EXPERTS
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

HEADER_BYTES = mmap.PAGESIZE
CODE = (
    *(stored_formats, group_layout, packed, gguf_weights),
    *(fused_experts, fused_weights, quantised_source, rotary_order, rope),
    *(float8_scheme, integer_formats, integer_schemes),
)
"""What decides the bytes of a packed weight. Its sources are a part of every file's name."""
_FILE_NAME = "weights.packed"
_LOG_EVERY_BYTES = 256 << 20

_logger = logging.getLogger("pdserve.engine")


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One packed weight: tensors with equal inputs, whose outputs are in this order.

    `rotation` is what the order of query and key heads follows from: the sizes of a head and of its
    rotated part, and whether pairs in the files are neighbours. With `is_fine`, activations in int8
    have a step for 16 values: where their error changes logits most for the time that this costs.
    Products `in_floats` never take activations in int8.
    """

    key: str
    names: tuple[str, ...]
    rotation: tuple[int, int, bool] | None = None
    is_fine: bool = False
    in_floats: bool = False

    def tensors(self, source: TensorSource) -> Iterator[GroupedTensor]:
        """Return the stored rows in the order in which they are packed.

        Each is read when it is due: all experts of a layer may be gigabytes.
        """
        return (source.grouped(name) for name in self.names)

    def formats_and_shapes(self, source: TensorSource) -> list[tuple[str, tuple[int, int]]]:
        """Return the format and (outputs, inputs) of each tensor, reading none."""
        return [source.format_and_shape(name) for name in self.names]

    def view(
        self, formats_and_shapes: Sequence[FormatAndShape], data: Bytes, *, with_bytes: bool
    ) -> PackedWeight:
        """Return what was packed into `data` for the kernels; `with_bytes` as in `packed_view`."""
        with_bytes = with_bytes and not self.in_floats
        return packed_view(formats_and_shapes, data, with_bytes=with_bytes, is_fine=self.is_fine)


def layer_plans(
    spec: DecoderSpec, prefix: str, mixture: ExpertMixture | None = None
) -> list[PackedPlan]:
    """Return the packed weights of one layer, whose tensors' names begin with `prefix`.

    `mixture` is that of the layer, None for one with a single MLP.
    """
    rotation = spec.head_dim, spec.rotated_dim, spec.is_rope_interleaved
    qkv = tuple(f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")
    plans = [
        PackedPlan(f"{prefix}qkv", qkv, rotation, is_fine=True),
        PackedPlan(f"{prefix}output", (f"{prefix}self_attn.o_proj.weight",)),
    ]
    if mixture is None:
        return plans + _mlp_plans(prefix, "", [f"{prefix}mlp"])
    # A choice that int8 activations changed would be that of another model.
    plans.append(
        PackedPlan(f"{prefix}expert_gate", (f"{prefix}{EXPERT_GATE}.weight",), in_floats=True)
    )
    experts = [f"{prefix}mlp.experts.{number}" for number in range(mixture.num_experts)]
    plans += _mlp_plans(prefix, "experts_", experts)
    if mixture.shared_size:
        plans += _mlp_plans(prefix, "", [f"{prefix}{SHARED_EXPERTS}"])
    return plans


def _mlp_plans(prefix: str, kind: str, mlps: Sequence[str]) -> list[PackedPlan]:
    """Return gate and up of each MLP in turn, and the down projections of all."""
    gate_up = [f"{mlp}.{name}_proj.weight" for mlp in mlps for name in ("gate", "up")]
    down = [f"{mlp}.down_proj.weight" for mlp in mlps]
    return [
        PackedPlan(f"{prefix}{kind}gate_up", tuple(gate_up)),
        PackedPlan(f"{prefix}{kind}down", tuple(down)),
    ]


def decoder_plans(spec: DecoderSpec) -> list[PackedPlan]:
    """Return all packed weights of a decoder, in the order in which they are in the file."""
    plans = [PackedPlan("embedding", ("model.embed_tokens.weight",), is_fine=True)]
    if not spec.has_tied_embeddings:
        plans.append(PackedPlan("head", ("lm_head.weight",), is_fine=True))
    for layer in range(spec.num_layers):
        plans += layer_plans(spec, f"model.layers.{layer}.", spec.mixture_of(layer))
    return plans


@cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for module in CODE:
        digest.update(Path(module.__file__ or "").read_bytes())
    return digest.hexdigest()


def pack_privately(
    source: TensorSource, plans: Sequence[PackedPlan], memory: WeightMemory, *, with_bytes: bool
) -> dict[str, PackedWeight]:
    """Return the packed weights by key, in memory of this process.

    `with_bytes` chooses int8 activations.
    """
    packed = {}
    for plan in plans:
        described = plan.formats_and_shapes(source)
        data = memory.zeros((packed_bytes(described),), np.dtype(np.uint8))
        pack_into(plan.tensors(source), data)
        packed[plan.key] = plan.view(described, data, with_bytes=with_bytes)
    return packed


class SharedWeights:
    """The packed weights of one file, which all nodes of a machine map."""

    def __init__(self, source: TensorSource, plans: Sequence[PackedPlan], folder: Path) -> None:
        """Name the file, which is below `folder`; it reads and writes nothing else."""
        self._source, self._plans = source, plans
        self._described = {plan.key: plan.formats_and_shapes(source) for plan in plans}
        self._sizes = {key: packed_bytes(one) for key, one in self._described.items()}
        plans_json = [
            # What a release before did not know, and changes no byte, is no part of the name.
            {name: value for name, value in asdict(plan).items() if name != "in_floats"}
            for plan in plans
        ]
        described = list(self._described.items())
        identity = [_code_digest(), source.identity(), source.stamps(), plans_json, described]
        self._key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self._home = folder / self._key[:32]
        self._path = self._home / _FILE_NAME

    def write(self) -> None:
        """Make the file unless it exists; `CheckpointError` when it cannot be written."""
        build_once(self._home, self._build)

    def map(self, *, with_bytes: bool) -> dict[str, PackedWeight]:
        """Return the packed weights by key, in the mapped file, made on first use.

        Raises `CheckpointError` as `write` does, and when it is wrong again after it was made anew.
        """
        self.write()
        data, problem = self._mapped()
        if problem:
            _logger.warning("%s: %s: it is made anew", self._path, problem)
            rebuild(self._home, self._build, lambda: not self._mapped()[1])
            data, problem = self._mapped()
        if data is None:
            raise CheckpointError(f"{self._path}: {problem}, after it was made anew")
        weights, start = {}, 0
        for plan in self._plans:
            end, described = start + self._sizes[plan.key], self._described[plan.key]
            weights[plan.key] = plan.view(described, data[start:end], with_bytes=with_bytes)
            start = end
        return weights

    def _build(self, building: Path) -> None:
        _write(building / _FILE_NAME, self._key, self._source, self._plans, self._sizes)

    def _mapped(self) -> tuple[np.ndarray | None, str]:
        return _mapped(self._path, self._key, sum(self._sizes.values()))


def _write(
    path: Path,
    key: str,
    source: TensorSource,
    plans: Sequence[PackedPlan],
    sizes: dict[str, int],
) -> None:
    total = sum(sizes.values())
    with path.open("w+b") as file:
        # With its space reserved a full disk is an error here, and not a signal at a later write.
        os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + total)
        mapped = mmap.mmap(file.fileno(), HEADER_BYTES + total)
        data = np.frombuffer(mapped, np.uint8)[HEADER_BYTES:]
        start = logged = 0
        for plan in plans:
            if start >= logged:
                _logger.info(
                    "packing the weights for this machine's kernels: %d of %d MB",
                    start >> 20,
                    total >> 20,
                )
                logged += _LOG_EVERY_BYTES
            end = start + sizes[plan.key]
            pack_into(plan.tensors(source), data[start:end])
            start = end
        header = json.dumps({"key": key, "size": total, "crc32": zlib.crc32(data.data)}).encode()
        mapped[: len(header)] = header
        mapped.flush()
        os.fsync(file.fileno())


def _mapped(path: Path, key: str, size_bytes: int) -> tuple[np.ndarray | None, str]:
    """Return the data of the file at `path`, uint8 and read-only; or what is wrong with it."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            if length != HEADER_BYTES + size_bytes:
                return None, f"{length} bytes: wanted {HEADER_BYTES + size_bytes}"
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(file.fileno(), length, flags=flags, prot=mmap.PROT_READ)
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    whole = np.frombuffer(mapped, np.uint8)
    data = whole[HEADER_BYTES:]
    wanted = {"key": key, "size": size_bytes, "crc32": zlib.crc32(data.data)}
    try:
        found = json.loads(bytes(whole[:HEADER_BYTES]).rstrip(b"\0"))
    except ValueError:
        return None, "the header is broken"
    if found != wanted:
        return None, f"the header says {found}: wanted {wanted}"
    return data, ""
