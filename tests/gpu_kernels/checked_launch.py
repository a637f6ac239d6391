"""What a card's memory checker would find in a launch, found while the interpreter runs it.

    outside        a program touches bytes that are not of the tensor which its argument points to
    unwaited       a program of a programmatic launch touches memory before it waits for the kernel
                   before, or ends without a wait
    races          two programs write a byte, or one reads what another one writes: they run beside
                   each other on a card. In one program: two lanes store different values in one
                   place, or what was stored is read again, for which threads would have to wait

A pointer's upper 16 bits, which no address has, are the number of the argument that it began as: so
each address that is computed from it says which tensor it may lie in. The order of programs is any,
and `programs_in` sets it.

The interpreter runs a program's operations one after the other, each for all lanes, so a kernel
whose threads would have to wait for each other within an operation is no better known by this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from triton.runtime import interpreter

from engine.runner.gpu.kernels import ordering
from tests.gpu_kernels.known_memory import Range, known

_TAG_BITS = 48
_ADDRESS = (1 << _TAG_BITS) - 1
_LOW = np.uint64(_ADDRESS)
_WORD_BYTES = 8

_stored: dict[str, set[str]] = {}
"""The arguments that launches of a kernel have stored to. What is read of all others cannot race,
and is not kept: weights are large."""
off_byte = 0xFF
"""What lanes that are off get from a load that does not say it: on a card, anything."""
_order: str | int = "in order"
_current: CheckedLaunch | None = None


class MemoryFault(AssertionError):
    """A launch did what goes wrong on a card, or may go wrong."""


@contextmanager
def programs_in(order: str | int) -> Iterator[None]:
    """Run the programs of each launch "in order", "reversed", or as this seed shuffles them."""
    global _order
    before, _order = _order, order
    try:
        yield
    finally:
        _order = before


def tagged(address: int, number: int) -> int:
    """Return an address that says which argument it is, the first one being 1."""
    return address | number << _TAG_BITS


def extents(addresses: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, Range]:
    """Return the bytes that each argument of a launch may touch.

    It is the part of memory that the argument points into, up to where the next argument points. A
    layer's values lie behind its keys, and are as many; what copies blocks has the size of a layer.
    """
    found = {}
    for name, address in addresses.items():
        part = known.at(address) or Range(0, _ADDRESS if address else 0, "unknown memory")
        following = [other for other in addresses.values() if address < other < part.end]
        found[name] = part._replace(end=min([part.end, *following]))
    if addresses.keys() >= {"keys", "key_scales"}:
        size = addresses["values"] - addresses["keys"]
        for name in ("keys", "key_scales", "values", "value_scales"):
            own, part = addresses[name], found[name]
            found[name] = Range(own, min(part.end, own + size), f"a layer's {name}")
    for name, number in _LAYERS.items():
        if name in found and number in given and "WORDS" in given:
            size = 2 * int(given[number]) * int(given["WORDS"]) * _WORD_BYTES
            part = found[name]
            found[name] = part._replace(end=min(part.end, addresses[name] + size))
    return found


_LAYERS = {
    "pool": "num_blocks", "host": "num_host_blocks", "source": "num_source_blocks",
    "target": "num_blocks",
}  # fmt: skip
"""What kernels that copy blocks call a layer of a cache, and how many blocks it has."""


class _Access(NamedTuple):
    time: int
    program: int
    argument: str
    places: np.ndarray
    size: int
    values: np.ndarray | None


@dataclass(slots=True)
class Touched:
    """What a launch touched: arrays of addresses, with the bytes from each of them on."""

    loads: list[tuple[np.ndarray, int]]
    stores: list[tuple[np.ndarray, int]]


class CheckedLaunch:
    """One launch and the bytes that each argument may touch. `touched` gets what it does touch."""

    def __init__(
        self, kernel: str, grid: Sequence[int], arguments: Mapping[str, Range], *,
        is_programmatic: bool, touched: Touched | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._is_programmatic, self._touched = kernel, is_programmatic, touched
        self._names = ["", *arguments]
        self._ranges = [Range(0, 0, ""), *arguments.values()]
        self._order = _in_order(int(np.prod(grid)))
        self._program = -1
        self._has_waited = True
        self._time = 0
        self._stores: list[_Access] = []
        self._loads: list[_Access] = []
        self._stored = _stored.setdefault(kernel, set())
        self._kept = self._may_race()

    def _may_race(self) -> set[str]:
        """Return the arguments whose memory this kernel is known to store to."""
        written = [
            one for name, one in zip(self._names, self._ranges, strict=True) if name in self._stored
        ]
        return {
            name
            for name, own in zip(self._names, self._ranges, strict=True)
            if any(own.start < one.end and one.start < own.end for one in written)
        }

    def begin_program(self, number: int) -> int:
        """Begin the next program; return which one it is."""
        self._end_program()
        self._program = number if self._order is None else int(self._order[number])
        self._has_waited = False
        return self._program

    def _end_program(self) -> None:
        if self._is_programmatic and not self._has_waited:
            self._fail("ends without a wait for the kernel before")

    def wait(self) -> None:
        """The program waits until the kernel before has ended."""
        self._has_waited = True

    def _fail(self, what: str) -> None:
        raise MemoryFault(f"{self._kernel}, program {self._program}: {what}")

    def touch(self, kind: str, pointers: Any, mask: np.ndarray | None, value: Any = None) -> Any:
        """Take note of an access; return the pointers as addresses."""
        places = pointers.data
        chosen = places.reshape(-1) if mask is None else places[mask]
        if chosen.size:
            low = int(chosen[0])
            high = low
            if chosen.size > 1:
                low, high = int(chosen.min()), int(chosen.max())
            size = pointers.dtype.element_ty.primitive_bitwidth // 8 or 1
            name = self._check(kind, low, high + size)
            if kind != "prefetches":
                self._keep(kind, name, chosen, size, (places.shape, mask, value))
        return interpreter.TensorHandle(places & _LOW, pointers.dtype)

    def _check(self, kind: str, low: int, high: int) -> str:
        """Check pointers from `low` up to `high`; return the argument that they began as."""
        number = low >> _TAG_BITS
        own = self._ranges[number] if number < len(self._ranges) else self._ranges[0]
        name = self._names[number] if number < len(self._names) else ""
        first, end = low & _ADDRESS, high - (number << _TAG_BITS)
        if first < own.start or end > own.end:
            self._fail(
                f"{kind} bytes {first - own.start} to {end - own.start} of {name}, which has "
                f"{own.end - own.start} ({own.name})"
            )
        if self._is_programmatic and not self._has_waited and kind != "prefetches":
            self._fail(f"{kind} {name} before it waits for the kernel before")
        return name

    def _keep(
        self, kind: str, name: str, chosen: np.ndarray, size: int,
        stored: tuple[tuple[int, ...], np.ndarray | None, Any],
    ) -> None:  # fmt: skip
        """Keep an access of an argument. `stored`: of how many lanes, of which of them, what."""
        is_load = kind == "loads"
        if self._touched is not None:
            found = self._touched.loads if is_load else self._touched.stores
            found.append((chosen & _LOW, size))
        if not is_load and name not in self._stored:
            self._stored.add(name)
            self._kept = self._may_race()
        if name not in self._kept:
            return
        self._time += 1
        values = None
        if kind == "stores":
            shape, mask, value = stored
            whole = np.broadcast_to(value.data, shape)
            values = whole.reshape(-1) if mask is None else whole[mask]
        access = _Access(self._time, self._program, name, chosen & _LOW, size, values)
        (self._loads if is_load else self._stores).append(access)

    def finish(self) -> None:
        """Raise `MemoryFault` for what programs did to each other."""
        self._end_program()
        if not self._stores:
            return
        unit = min(access.size for access in (*self._stores, *self._loads))
        cells = [_cells(access, unit) for access in self._stores]
        owners = np.repeat(np.arange(len(cells)), [len(own) for own in cells])
        bits = np.concatenate([_bits(access, unit) for access in self._stores])
        joined = np.concatenate(cells)
        order = np.argsort(joined, kind="stable")
        joined, owners, bits = joined[order], owners[order], bits[order]
        programs = np.array([access.program for access in self._stores])[owners]
        self._check_stores(joined, owners, bits, programs)
        times = np.array([access.time for access in self._stores])[owners]
        for access in self._loads:
            own = _cells(access, unit)
            found = np.minimum(np.searchsorted(joined, own), len(joined) - 1)
            found = found[joined[found] == own]
            self._program = access.program
            others = programs[found] != access.program
            if others.any():
                writer = int(programs[found][others][0])
                self._fail(f"reads bytes of {access.argument} that program {writer} writes")
            if (times[found] < access.time).any():
                self._fail(f"reads bytes of {access.argument} that it has written itself")

    def _check_stores(
        self, cells: np.ndarray, owners: np.ndarray, bits: np.ndarray, programs: np.ndarray
    ) -> None:
        """Compare stores of the same cells, in ascending order, with each other.

        Equal values are none of the order's business, and atomic changes are made in any order.
        """
        is_atomic = np.array([access.values is None for access in self._stores])[owners]
        differs = (bits[1:] != bits[:-1]) | (is_atomic[1:] != is_atomic[:-1])
        for place in np.flatnonzero((cells[1:] == cells[:-1]) & differs).tolist():
            name = self._stores[owners[place]].argument
            self._program = int(programs[place])
            other = int(programs[place + 1])
            if owners[place] == owners[place + 1]:
                self._fail(f"stores different values in one place of {name}")
            if self._program == other:
                self._fail(f"writes bytes of {name} twice")
            self._fail(f"writes bytes of {name} that program {other} writes too")


def _bits(access: _Access, unit: int) -> np.ndarray:
    """Return what an access stores in each unit of memory, 0 for an atomic change."""
    if access.values is None:
        return np.zeros(len(access.places) * (access.size // unit), np.uint64)
    raw = np.ascontiguousarray(access.values)
    assert raw.itemsize == access.size
    return raw.view(f"u{unit}").reshape(-1).astype(np.uint64)


def _in_order(count: int) -> np.ndarray | None:
    if _order == "in order":
        return None
    if _order == "reversed":
        return np.arange(count)[::-1]
    assert isinstance(_order, int)
    return np.random.default_rng(_order).permutation(count)


def _cells(access: _Access, unit: int) -> np.ndarray:
    """Return the numbers of the units of memory that an access touches."""
    first = access.places // np.uint64(unit)
    if access.size == unit:
        return first
    within = np.arange(access.size // unit, dtype=np.uint64)
    found: np.ndarray = (first[:, None] + within).reshape(-1)
    return found


@contextmanager
def checking(launch: CheckedLaunch) -> Iterator[None]:
    """Check what the interpreter runs meanwhile; one launch at a time."""
    global _current
    _current = launch
    try:
        yield
        launch.finish()
    finally:
        _current = None


# --- what the interpreter does ------------------------------------------------------------------

_Builder = interpreter.InterpreterBuilder
_plain_program = _Builder.set_grid_idx
_plain_load, _plain_store = _Builder.create_masked_load, _Builder.create_masked_store
_plain_atomic, _plain_swap = _Builder.create_atomic_rmw, _Builder.create_atomic_cas


def _begin_program(builder: Any, x: int, y: int, z: int) -> None:
    if _current is not None:
        _, height, depth = builder.grid_dim
        rest, z = divmod(_current.begin_program((x * height + y) * depth + z), depth)
        x, y = divmod(rest, height)
    _plain_program(builder, x, y, z)


def _load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
    if _current is not None:
        some = _some(mask)
        pointers = _current.touch("loads", pointers, some)
        if other is None and some is not None:
            other = _undefined(pointers)
    return _plain_load(builder, pointers, mask, other, *rest, **named)


def _undefined(pointers: Any) -> Any:
    """Return what lanes get that are off, where nothing is said."""
    kind = pointers.get_element_ty()
    number = interpreter._get_np_dtype(kind)
    raw = np.full(pointers.data.size * number.itemsize, off_byte, np.uint8)
    return interpreter.TensorHandle(raw.view(number).reshape(pointers.data.shape), kind)


def _store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    if _current is not None:
        pointers = _current.touch("stores", pointers, _some(mask), value)
    return _plain_store(builder, pointers, value, mask, *rest)


def _atomic(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    if _current is not None:
        pointers = _current.touch("changes", pointers, _some(mask))
    return _plain_atomic(builder, operation, pointers, value, mask, *rest)


def _swap(builder: Any, pointers: Any, *rest: Any) -> Any:
    if _current is not None:
        pointers = _current.touch("changes", pointers, None)
    return _plain_swap(builder, pointers, *rest)


def _some(mask: Any) -> np.ndarray | None:
    """Return which lanes are on; None: all are."""
    is_on = np.asarray(mask.data).astype(np.bool_, copy=False)
    return None if is_on.all() else is_on


class _NoResult:
    """What PTX without a result returns."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_result(self, _: int) -> Any:
        return interpreter.TensorHandle(np.zeros(self._shape, np.int32), interpreter.tl.int32)


def _assembly(_: Any, text: str, __: str, values: Sequence[Any], *___: Any) -> Any:
    """Take note of memory that is asked for ahead; the interpreter knows no other PTX."""
    if not text.startswith("prefetch.global.L2"):
        raise NotImplementedError(text)
    if _current is not None:
        _current.touch("prefetches", values[0], None)
    return _NoResult(values[0].data.shape)


def _wait() -> None:
    if _current is not None:
        _current.wait()


def check_launches() -> None:
    """Let the interpreter take note from now on."""
    _Builder.set_grid_idx = _begin_program
    _Builder.create_masked_load, _Builder.create_masked_store = _load, _store
    _Builder.create_atomic_rmw, _Builder.create_atomic_cas = _atomic, _swap
    _Builder.create_inline_asm = _assembly
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    ordering.gdc_wait, ordering.gdc_launch_dependents = _wait, nothing
