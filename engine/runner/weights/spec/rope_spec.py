"""The rotary positions of a decoder, as config.json states them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.files.model_config import MOST_POSITIONS
from engine.runner.weights.spec.config_values import ConfigValues

_NOT_COMPUTED = {"alpha": 1, "attn_factor": 1, "extrapolation_factor": 1}
"""Keys of other programs and families for rotary positions, and the values that change nothing."""
_SHARE = "partial_rotary_factor"
_GROWTH = "llama_4_scaling_beta"
_SECTIONS = "mrope_section"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions. `kind` is default, linear, llama3, yarn, longrope, or none.

    `factor` stretches wavelengths. The last three fields are llama3's and yarn's: a pair that turns
    up to `low_freq_factor` times in the original context is stretched, one that turns at least
    `high_freq_factor` times is not, and those between in part.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnSpec(RopeSpec):
    """Rotary positions of the kind yarn.

    `attention_factor` multiplies queries and keys. With `has_whole_bounds` the pairs at which
    stretching begins and ends are rounded outwards to whole ones.
    """

    attention_factor: float
    has_whole_bounds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeSpec(RopeSpec):
    """Rotary positions of the kind longrope, in contexts up to the model's original one.

    The frequency of each pair is divided by its one of `factors`; `attention_factor` multiplies
    queries and keys. Longer sequences have other factors, also for their first positions, so the
    keys of a prefix would depend on what follows it: they are refused.
    """

    attention_factor: float
    factors: tuple[float, ...]


NO_ROTATION = RopeSpec(kind="none", theta=1.0)
"""The rotary positions of a layer without any."""


def read_unrotated_layers(config: ConfigValues, num_layers: int) -> tuple[int, ...]:
    """Return the layers of SmolLM3 whose heads are not rotated.

    `no_rope_layers` has 1 for each layer that is rotated, and 0 for others. Without it every
    `no_rope_layer_interval`-th layer is not. Raises `CheckpointError` for another list.
    """
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    is_list = isinstance(stated, list) and all(
        isinstance(one, int | bool) and one in (0, 1) for one in stated
    )
    if not is_list or len(stated) != num_layers:
        raise config.refuse("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return tuple(layer for layer, is_rotated in enumerate(stated) if not is_rotated)


def read_rotated_dim(config: ConfigValues, head_dim: int, share: float | None) -> int:
    """Return how many of a head's first dimensions are rotated, 0: all of them.

    `partial_rotary_factor` is in `rope_parameters` or `rope_scaling`, or else beside them. `share`
    is the family's where it is in none of them; None: in this family all dimensions are rotated.
    Raises `CheckpointError` for a share that is not computed.
    """
    sections = [config.section(key) for key in ("rope_parameters", "rope_scaling")]
    stated = [one for one in (*sections, config) if one is not None and one.has(_SHARE)]
    dims = set()
    for values in stated:
        found = values.number(_SHARE, share or 1.0)
        if share is None and found != 1.0:
            raise values.refuse(_SHARE, "1: all of a head is rotated")
        dim = int(head_dim * found)
        if dim % 2 or not 2 <= dim <= head_dim:
            raise values.refuse(_SHARE, f"an even number of dimensions of {head_dim}, or all")
        dims.add(dim)
    if len(dims) > 1:
        raise config.refuse(_SHARE, "the same wherever it stands")
    dim = dims.pop() if dims else int(head_dim * (share or 1.0))
    return dim if dim < head_dim else 0


def read_rope_spec(
    config: ConfigValues, default_theta: float, max_position: int, num_pairs: int
) -> RopeSpec:
    """Return the rotary positions of heads of which `num_pairs` pairs are rotated.

    They are in `rope_parameters` (newer files) or in `rope_theta` and `rope_scaling` (older ones).
    A file with both, which programs read differently, has to say the same twice.
    """
    newer, older = config.section("rope_parameters"), config.section("rope_scaling")
    theta = (newer or config).number("rope_theta", config.number("rope_theta", default_theta))
    specs = [
        _scaled_rope(config, scaling, theta, max_position, num_pairs)
        for scaling in (newer, older)
        if scaling is not None
    ]
    if not specs:
        return RopeSpec(kind="default", theta=theta)
    if specs[0] != specs[-1]:
        raise config.refuse("rope_scaling", "what rope_parameters says, or only one of the two")
    return specs[0]


def _scaled_rope(
    config: ConfigValues, scaling: ConfigValues, theta: float, max_position: int, num_pairs: int
) -> RopeSpec:
    """Return the rotary positions that one of the two sections describes."""
    for key, neutral in _NOT_COMPUTED.items():
        if scaling.get(key) not in (None, neutral):
            raise scaling.refuse(key, f"{neutral}: it is not computed")
    theta = scaling.number("rope_theta", theta)
    key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(key) or "default"
    if scaling.has(_SECTIONS):
        _refuse_other_sections(scaling, num_pairs)
    if scaling.get(_GROWTH) not in (None, 0):
        # Queries are multiplied by 1 + beta * log(1 + floor(position / original)): 1 in the first
        # original positions, and contexts end with them (`model_config.longest_context`).
        scaling.number(_GROWTH)
        if kind != "yarn":
            raise scaling.refuse(_GROWTH, "0: it is read with yarn alone")
    if kind in ("default", "dynamic", "mrope"):
        # dynamic changes nothing up to max_position_embeddings, and longer contexts are refused.
        return RopeSpec(kind="default", theta=theta)
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, factor=scaling.number("factor"))
    # A length beside the section counts first, as in transformers.
    is_beside = config.get("original_max_position_embeddings") is not None
    original = config if is_beside else scaling
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=scaling.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original.integer(
                "original_max_position_embeddings", max_position
            ),
        )
    if kind == "yarn":
        return _yarn_spec(scaling, theta, original.integer("original_max_position_embeddings"))
    if kind == "longrope":
        length = original.integer("original_max_position_embeddings", max_position, least=2)
        return _long_rope_spec(scaling, theta, length, max_position, num_pairs)
    raise scaling.refuse(key, "default, dynamic, linear, llama3, mrope, yarn or longrope")


def _refuse_other_sections(scaling: ConfigValues, num_pairs: int) -> None:
    """Raise `CheckpointError` unless `mrope_section` divides a head's pairs into three sections.

    Each turns by a position of its own in time, height or width. Those of a text are all equal, so
    sections, in turns or not (`mrope_interleaved`), change nothing.
    """
    found = scaling.get(_SECTIONS)
    is_list = isinstance(found, list) and all(type(one) is int and one > 0 for one in found)
    if not is_list or len(found) != 3 or sum(found) != num_pairs:
        raise scaling.refuse(_SECTIONS, f"three numbers of pairs, {num_pairs} together")


def _long_rope_spec(
    scaling: ConfigValues, theta: float, original: int, max_position: int, num_pairs: int
) -> LongRopeSpec:
    """Return the rotary positions of LongRoPE up to the `original` context."""
    factors = scaling.get("short_factor")
    is_list = isinstance(factors, list) and len(factors) == num_pairs
    if not is_list or not all(_is_stretch(one) for one in factors):
        raise scaling.refuse("short_factor", f"a list of {num_pairs} numbers from 1e-6 to 1e6")
    factor = scaling.number("factor", max_position / original)
    attention_factor = math.sqrt(1.0 + math.log(max(factor, 1.0)) / math.log(original))
    return LongRopeSpec(
        kind="longrope",
        theta=theta,
        attention_factor=scaling.number("attention_factor", attention_factor),
        factors=tuple(float(one) for one in factors),
    )


def _is_stretch(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1e-6 <= value <= 1e6


def _yarn_spec(scaling: ConfigValues, theta: float, original: int) -> YarnSpec:
    """Return the rotary positions of YaRN for a model whose context was `original` tokens."""
    if theta <= 1:
        raise scaling.refuse("rope_theta", "a number above 1 with yarn")
    factor = scaling.number("factor")
    if not 1 <= factor <= MOST_POSITIONS / original:
        raise scaling.refuse("factor", "at least 1, and a context that is possible")
    slow, fast = scaling.number("beta_slow", 1.0), scaling.number("beta_fast", 32.0)
    if fast <= slow:
        raise scaling.refuse("beta_fast", f"more than beta_slow, {slow:g}")
    return YarnSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        low_freq_factor=slow,
        high_freq_factor=fast,
        original_max_position=original,
        attention_factor=_attention_factor(scaling, factor),
        has_whole_bounds=scaling.flag("truncate", True),
    )


def _attention_factor(scaling: ConfigValues, factor: float) -> float:
    """Return by what YaRN multiplies queries and keys, as given or as its paper has it.

    `mscale` and `mscale_all_dim` (DeepSeek, Mistral) count where neither is missing or 0.
    """
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    shares = [
        scaling.number(key) if scaling.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")
    ]
    if all(shares):
        above, below = (1.0 + 0.1 * share * math.log(factor) for share in shares)
        return above / below
    return 1.0 + 0.1 * math.log(factor)
