"""The recording of a router's placement: the inputs and the answers of its two machines.

A line is one call: `to` a machine, `call`, its arguments `with` and `by`, and what it `gave`.
`simulator/replays` makes the same calls again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.kv.blocks import BlockKey
from common.recording.calls import recorded
from common.recording.file import RecordingFile
from common.recording.pseudonyms import Pseudonyms
from common.recording.values import as_json
from router.core.known.block_reports import BlockReport
from router.core.known.roster import Roster
from router.core.membership import Membership
from router.core.placement import Chooser, Placing
from router.core.policies.query import Query

MEMBERSHIP, CHOOSER = "membership", "chooser"
MEMBERSHIP_CALLS = (
    "on_asking",
    "on_listing",
    "on_store_away",
    "on_heard",
    "on_suspected",
    "on_lost",
    "on_role",
    "on_leg_opened",
    "on_prompt_computed",
    "on_leg_closed",
    "nodes",
    "max_model_len",
)
"""The calls that change the machine; all others only read."""
CHOOSER_CALLS = ("choose", "on_blocks", "on_lost", "on_worked", "on_failed")


@dataclass(frozen=True, slots=True)
class NodesThen:
    """The nodes that could be chosen: those that `Membership.nodes` gave last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedQuery:
    """A `Query` without its tokens: how many there are, and the keys of its full blocks.

    `keys` are those that were asked for, by the fingerprint and the block size of a node.
    """

    num_prompt_tokens: int
    max_tokens: int
    needs_grammars: bool = False
    needs_token_rules: bool = False
    needs_prompt_logprobs: bool = False
    session: bytes = b""
    keys: tuple[tuple[str, int, tuple[BlockKey, ...]], ...] = ()

    def query(self) -> Query:
        """Return a query that asks the same of nodes."""
        return Query(
            (0,) * self.num_prompt_tokens,
            self.max_tokens,
            needs_grammars=self.needs_grammars,
            needs_token_rules=self.needs_token_rules,
            needs_prompt_logprobs=self.needs_prompt_logprobs,
            session=self.session,
            known_keys={(name, size): found for name, size, found in self.keys},
        )


class PlacingRecording:
    """Records the two machines that it makes. Belongs to the event loop."""

    def __init__(self, folder: Path, router_id: str, placing: Placing) -> None:
        """Begin the file. Raises `ConfigError` where it cannot be written."""
        self._placing = placing
        self._names = Pseudonyms()
        header = {"of": "placing", "node_id": router_id, "placing": asdict(placing)}
        self._file = RecordingFile(folder, router_id, header)

    def machines(self) -> tuple[Membership, Chooser]:
        """Return both machines of `Placing`, recorded."""
        membership, chooser = self._placing.machines()
        write_to = partial(partial, self._write)
        return (
            recorded(membership, MEMBERSHIP_CALLS, write_to(MEMBERSHIP), self._file),
            recorded(chooser, CHOOSER_CALLS, write_to(CHOOSER), self._file),
        )

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(
        self, machine: str, call: str, given: tuple[Any, ...], named: dict[str, Any], found: Any
    ) -> None:
        if call == "on_heard" and not found:
            return  # nothing is new about the node, as with almost every message
        line: dict[str, Any] = {"to": machine, "call": call}
        if given:
            line["with"] = [as_json(self._shown(one)) for one in given]
        if named:
            line["by"] = {name: as_json(self._shown(one)) for name, one in named.items()}
        if found is not None and not isinstance(found, Roster):
            line["gave"] = as_json(found)
        self._file.write(line)

    def _shown(self, value: Any) -> Any:
        """Return an argument as it is recorded."""
        names = self._names
        match value:
            case Roster():
                return NodesThen()
            case BlockReport():
                added, removed = map(names.of_key, value.added), map(names.of_key, value.removed)
                return value._replace(added=tuple(added), removed=tuple(removed))
            case Query():
                return _shown_query(value, names.of, names.of_key)
        return value


def _shown_query(
    query: Query, of_session: Callable[[bytes], bytes], of_key: Callable[[BlockKey], BlockKey]
) -> RecordedQuery:
    return RecordedQuery(
        num_prompt_tokens=len(query.prompt_token_ids),
        max_tokens=query.max_tokens,
        needs_grammars=query.needs_grammars,
        needs_token_rules=query.needs_token_rules,
        needs_prompt_logprobs=query.needs_prompt_logprobs,
        session=of_session(query.session),
        keys=tuple(
            (name, size, tuple(map(of_key, found)))
            for (name, size), found in query.known_keys.items()
        ),
    )
