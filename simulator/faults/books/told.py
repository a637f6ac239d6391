"""What flows tell beside tokens: that a request is accepted, where it is placed, its counts."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InternalError
from common.ids import AttemptId
from common.request import NO_COUNTS, RequestCounts
from router.core.effects import Accepted, Effect, Fail, Finish, PlaceRecord, Unplace


class Placements:
    """The placements of one router in the store, and the requests that were accepted."""

    def __init__(self) -> None:
        self._placed: set[AttemptId] = set()
        self._accepted: set[str] = set()

    def take(self, name: str, effects: Iterable[Effect], *, has_tokens: bool) -> None:
        """Take effects of a request, which its client knows to be accepted if it `has_tokens`.

        Raises `InternalError` for one that is accepted again, or leaves a placement when it ends.
        """
        for effect in effects:
            match effect:
                case Accepted():
                    if has_tokens or name in self._accepted:
                        raise InternalError(f"{name} is accepted twice, or after its first token")
                    self._accepted.add(name)
                case PlaceRecord(attempt):
                    self._placed.add(attempt)
                case Unplace(attempt):
                    self._placed.discard(attempt)
                case Finish() | Fail():
                    self._accepted.discard(name)
                    if any(attempt.choice_id == name for attempt in self._placed):
                        raise InternalError(f"{name} has ended, and its placement is in the store")


def check_counts(
    name: str, before: RequestCounts | None, counts: RequestCounts, num_prompt: int, num_tokens: int
) -> None:
    """Check what is counted for a request that has so many tokens; `before`: for the chunk before.

    Raises `InternalError`.
    """
    cached, drafted, accepted = counts
    earlier = before or NO_COUNTS
    is_fit = 0 <= cached < num_prompt or not cached
    if not is_fit or not 0 <= accepted <= min(drafted, num_tokens) or drafted < earlier.num_drafted:
        says = f"after {earlier}, for {num_prompt} and {num_tokens} tokens"
        raise InternalError(f"{name} has {counts} {says}")
