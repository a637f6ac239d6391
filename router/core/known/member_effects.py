"""What follows from an event of the membership, for requests and for the log. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from common.ids import Incarnation


@dataclass(frozen=True, slots=True)
class NodeLeftOut:
    """The store lists a node that cannot be a member."""

    node: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """A node is heard for the first time, or again."""

    node: Incarnation
    was_lost: bool


@dataclass(frozen=True, slots=True)
class NodeTrusted:
    """A node that was new or suspected makes progress."""

    node: Incarnation
    was_suspected: bool


@dataclass(frozen=True, slots=True)
class NodeDecodes:
    """A node that can be chosen decodes from now on: until now it computed prompts alone."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class NodeSuspected:
    """A node is suspected, or for another reason than before: it `is_heard` and not reached."""

    node: Incarnation
    reason: str
    is_heard: bool
    was_trusted: bool


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream of a node ended; `is_orderly`: as a node ends it that leaves."""

    node: Incarnation
    is_orderly: bool


@dataclass(frozen=True, slots=True)
class NodeGone:
    """Why a node is not heard: `has_left` in order, or it was lost."""

    node: Incarnation
    reason: str
    has_left: bool


@dataclass(frozen=True, slots=True)
class NodeUnlisted:
    """The store does not list a node that is heard."""

    node: Incarnation


MembershipEffect = (
    NodeLeftOut
    | NodeHeard
    | NodeTrusted
    | NodeDecodes
    | NodeSuspected
    | StreamLost
    | NodeGone
    | NodeUnlisted
)
