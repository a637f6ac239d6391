"""What makes a node a decode or a mixed one: which prompts it prefills itself."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Config
from common.nodes import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """`local_prefill_threshold` is in uncached prompt tokens; None: every prompt is local."""

    local_prefill_threshold: int | None

    def prefills_locally(self, num_uncached: int) -> bool:
        """Whether computing the prompt here beats sending for it."""
        limit = self.local_prefill_threshold
        return limit is None or num_uncached <= limit


def profile_of(config: Config) -> DecodeProfile:
    """A mixed node never asks for a partner; a decode node only for prompts worth the way."""
    if config.role is Role.MIXED:
        return DecodeProfile(local_prefill_threshold=None)
    return DecodeProfile(local_prefill_threshold=config.handoff.local_prefill_threshold)
