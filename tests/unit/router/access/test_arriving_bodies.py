"""Bodies that arrive: within bounds, and nobody is kept out by those of another client."""

from __future__ import annotations

from collections import Counter
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from router.access.arriving_bodies import Arrival, ArrivingBodies

OWNERS = ("a", "b", "c")


class World:
    """Bodies with names, and those that were let go, in order."""

    def __init__(self, max_bodies: int = 4, max_bytes: int = 100) -> None:
        self.bodies = ArrivingBodies(max_bodies=max_bodies, max_bytes=max_bytes)
        self.gone: list[str] = []
        self.here: dict[str, Arrival] = {}

    def begin(self, owner: str, number: int = 0) -> str:
        name = f"{owner}{number}"
        self.here[name] = self.bodies.begin(owner, partial(self._let_go, name))
        return name

    def _let_go(self, name: str) -> None:
        self.gone.append(name)
        del self.here[name]

    def grow(self, name: str, num_bytes: int = 1) -> None:
        self.bodies.grow(self.here[name], num_bytes)

    def end(self, name: str) -> None:
        self.bodies.end(self.here.pop(name))


def test_the_one_that_stood_still_longest_gives_way() -> None:
    world = World()
    for number in range(4):
        world.begin("a", number)
    world.grow("a0")
    world.begin("a", 4)
    assert world.gone == ["a1"]
    world.begin("a", 5)
    assert world.gone == ["a1", "a2"]


def test_of_the_client_that_has_most() -> None:
    world = World()
    world.begin("b")
    for number in range(4):
        world.begin("a", number)
    assert world.gone == ["a0"]
    world.begin("c")
    assert world.gone == ["a0", "a1"]
    assert set(world.here) == {"b0", "a2", "a3", "c0"}


def test_of_the_client_that_holds_most_bytes() -> None:
    world = World()
    for owner, number, size in (("b", 0, 30), ("a", 0, 20), ("a", 1, 20), ("b", 1, 0)):
        world.grow(world.begin(owner, number), size)
    world.grow("b1", 40)  # 110 in all, 70 of them b's
    assert world.gone == ["b0"]
    assert world.bodies.num_bytes == 80
    world.grow("b1", 30)  # and now it holds the most by itself
    assert world.gone == ["b0", "b1"]


def test_an_end_is_idempotent_and_gives_everything_back() -> None:
    world = World()
    world.grow(world.begin("a"), 50)
    arrival = world.here["a0"]
    world.end("a0")
    world.bodies.end(arrival)
    assert (world.bodies.num_bodies, world.bodies.num_bytes) == (0, 0)
    assert world.bodies.num_owners == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "grow", "grow", "end"]),
            st.sampled_from(OWNERS),
            st.integers(0, 120),
        ),
        max_size=60,
    )
)
def test_the_bounds_hold_and_the_counts_are_right(
    events: list[tuple[str, str, int]],
) -> None:
    world = World()
    for number, (event, owner, size) in enumerate(events):
        before = Counter(name[0] for name in world.here)
        num_gone = len(world.gone)
        if event == "begin":
            world.begin(owner, number)
            for name in world.gone[num_gone:]:
                assert before[name[0]] == max(before.values())
        elif mine := [name for name in world.here if name[0] == owner]:
            if event == "end":
                world.end(mine[0])
            else:
                world.grow(mine[-1], size)
        assert world.bodies.num_bodies == len(world.here) <= 4
        held = sum(arrival.num_bytes for arrival in world.here.values())
        assert world.bodies.num_bytes == held <= 100
