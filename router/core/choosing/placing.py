"""What decides where the requests of a router go, as it is made."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.choosing.chooser import Chooser
from router.core.membership import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The settings of its two machines: which nodes there are, and which are chosen."""

    model: str
    lease_s: float
    policy: str
    session_ttl_s: float
    seed: int

    def machines(self) -> tuple[Membership, Chooser]:
        """Return both, new. Raises `KeyError` for a policy that does not exist."""
        membership = Membership(model=self.model, lease_s=self.lease_s)
        return membership, Chooser(self.policy, self.session_ttl_s, self.seed)
