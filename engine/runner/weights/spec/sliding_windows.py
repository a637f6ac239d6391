"""Which layers attend to a window of positions, by config.json of each family.

A row of such a layer attends to the last `sliding_window` positions up to its own, as in
transformers. A window as long as the model's context is none.
"""

from __future__ import annotations

from engine.runner.weights.spec.config_values import ConfigValues

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OF_EVERY_LAYER = ("every", "stated")
_DEFAULT_WINDOW = 4096
_ALTERNATING_WINDOW = 128
"""The window of gpt-oss."""
_DEFAULT_FIRST_LAYER = 28
"""The first layer with a window in Qwen2 and Qwen3."""
_DEFAULT_PATTERN = 6
"""The distance between layers without a window in Gemma 3."""


def read_windows(config: ConfigValues, rule: str, num_layers: int, longest: int) -> tuple[int, ...]:
    """Return the window of each layer, 0: none; empty where no layer has one.

    `longest` is the longest context. `rule` is how the family decides: `every` (Mistral), `stated`
    (Phi: every layer, if config.json has a window), `after` (Qwen2 and Qwen3: the layers from
    `max_window_layers` on, with `use_sliding_window`), `pattern` (Gemma 3), `alternating` (gpt-oss:
    every other layer, the first one too), or empty: such models have no window. Raises
    `CheckpointError` for what contradicts it.
    """
    window = _window(config, rule)
    kinds = _layer_types(config, num_layers)
    if kinds is None:
        kinds = _kinds_by_rule(config, rule, num_layers, has_window=window is not None)
    elif rule in _OF_EVERY_LAYER and kinds != _kinds_by_rule(
        config, rule, num_layers, has_window=window is not None
    ):
        raise config.refuse("layer_types", f"what sliding_window says of every layer, {window}")
    if _SLIDING not in kinds:
        return ()
    if window is None:
        if rule:
            key = "sliding_window" if config.get("sliding_window") is None else "use_sliding_window"
            raise config.refuse(key, f"a window, as layer_types has {_SLIDING}")
        raise config.refuse("layer_types", f"a list of {_FULL}, one for each layer")
    if window >= longest:
        return ()
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _window(config: ConfigValues, rule: str) -> int | None:
    """Return the window that `sliding_window` states for layers that have one; None: none has."""
    is_used = config.flag("use_sliding_window", rule != "after" and bool(rule))
    if not rule:
        if is_used:
            raise config.refuse("use_sliding_window", "false: this family has no sliding windows")
        return None
    is_stated = config.get("sliding_window") is not None
    if not is_used or (not is_stated and (rule == "stated" or config.has("sliding_window"))):
        return None
    default = _ALTERNATING_WINDOW if rule == "alternating" else _DEFAULT_WINDOW
    return config.integer("sliding_window", default)


def _layer_types(config: ConfigValues, num_layers: int) -> list[str] | None:
    """Return the list `layer_types`; None: there is none."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    is_list = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not is_list or len(kinds) != num_layers:
        raise config.refuse(
            "layer_types", f"a list of {_FULL} and {_SLIDING}, one for each of {num_layers} layers"
        )
    return list(kinds)


def _kinds_by_rule(
    config: ConfigValues, rule: str, num_layers: int, *, has_window: bool
) -> list[str]:
    """Return what `layer_types` would say where it is missing."""
    if not has_window and rule not in ("pattern", "alternating"):
        return [_FULL] * num_layers
    if rule in _OF_EVERY_LAYER:
        return [_SLIDING] * num_layers
    if rule == "after":
        first = config.get("max_window_layers")
        first = _DEFAULT_FIRST_LAYER if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise config.refuse("max_window_layers", "a whole number of at least 0")
        return [_FULL if layer < first else _SLIDING for layer in range(num_layers)]
    pattern = 2
    if rule == "pattern":
        pattern = config.integer("sliding_window_pattern", _DEFAULT_PATTERN)
    return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]
