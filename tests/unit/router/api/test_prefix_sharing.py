"""Which requests share KV: the salt that each gets, by `prefix_sharing`, its key and its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from common.request import MAX_SALT_CHARS
from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key, hash_api_key, revoke_api_key
from router.api.prefix_sharing import PrefixSharing
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import Call, says

USER = [{"role": "user", "content": "Hello world"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hello world"},
    "/v1/responses": {"input": "Hello world"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
EVERY_ENDPOINT = pytest.mark.parametrize("path", BODIES)
KEYS = ("", hash_api_key(b"a"), hash_api_key(b"b"))
ASKED = ("", "a", "b", KEYS[1], PrefixSharing.KEY.salt(KEYS[1], ""), "\0", "\ud800", "x" * 256)


class Tenants:
    """Clients of one or several routers, each with a key of its own in one file."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.path = folder / "api_keys.json"
        self.keys = {name: add_api_key(self.path, name) for name in names} | {"": ""}

    def router(self, *, open_api: bool = False, **settings: Any) -> Edge:
        """A router that reads the file of the keys."""
        keys = ApiKeyBook(ManualClock(), path=self.path, open_api=open_api)
        return make_edge(says("Hello"), keys=keys, **settings)

    async def ask(
        self, edge: Edge, name: str, path: str = "/v1/completions", **fields: Any
    ) -> Call:
        """The call that a request of a tenant becomes; "" sends no key."""
        headers = {"authorization": f"Bearer {self.keys[name]}"} if name else {}
        headers["x-session-id"] = "one-session"
        async with edge.client() as client:
            answer = await client.post(path, json=BODIES[path] | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return edge.generator.calls[-1]

    async def salt(self, edge: Edge, name: str, path: str, **fields: Any) -> str:
        """The salt of the blocks of such a request."""
        return (await self.ask(edge, name, path, **fields)).cache_salt


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(tmp_path, "a", "b")


@pytest.mark.covers("K04")
@EVERY_ENDPOINT
async def test_by_default_keys_share_nothing_with_each_other(tenants: Tenants, path: str) -> None:
    edge, other = tenants.router(), tenants.router(prefix_sharing="key")
    mine, yours = [await tenants.salt(edge, name, path) for name in ("a", "b")]
    assert "" not in (mine, yours)
    assert mine != yours
    assert await tenants.salt(other, "a", path) == mine, "routers agree"
    further = [await tenants.salt(edge, name, path, cache_salt="s") for name in ("a", "b")]
    assert len({mine, yours, *further}) == 4
    stolen = await tenants.salt(edge, "b", path, cache_salt=mine)
    assert stolen not in (mine, yours, *further), "no salt leads into the blocks of another key"


@pytest.mark.covers("K04")
@EVERY_ENDPOINT
async def test_with_none_no_two_requests_share(tenants: Tenants, path: str) -> None:
    edge = tenants.router(prefix_sharing="none")
    salts = [await tenants.salt(edge, "a", path) for _ in range(3)]
    salts += [await tenants.salt(edge, "a", path, cache_salt="mine") for _ in range(3)]
    assert len(set(salts)) == 6
    assert "" not in salts


@pytest.mark.covers("K04")
@EVERY_ENDPOINT
async def test_with_all_a_request_has_the_salt_that_it_asks_for(
    tenants: Tenants, path: str
) -> None:
    edge = tenants.router(prefix_sharing="all")
    for name in ("a", "b"):
        assert await tenants.salt(edge, name, path) == ""
        assert await tenants.salt(edge, name, path, cache_salt="mine") == "mine"


@EVERY_ENDPOINT
async def test_clients_without_a_key_share_as_without_keys(tenants: Tenants, path: str) -> None:
    edge, keyless = tenants.router(open_api=True), make_edge(says("Hello"))
    mine = await tenants.salt(edge, "a", path)
    assert await tenants.salt(edge, "", path) == await tenants.salt(keyless, "", path) == ""
    assert await tenants.salt(tenants.router(), "a", path) == mine, "a key that is not required too"
    own = await tenants.salt(edge, "", path, cache_salt="s")
    assert own == await tenants.salt(keyless, "", path, cache_salt="s") != ""
    assert await tenants.salt(edge, "", path, cache_salt=mine) not in (mine, "")


@pytest.mark.parametrize("sharing", PrefixSharing)
async def test_the_choices_of_a_request_share(tenants: Tenants, sharing: str) -> None:
    edge = tenants.router(prefix_sharing=sharing)
    await tenants.ask(edge, "a", n=3, prompt=["Hello", "Hello"])
    assert len({call.cache_salt for call in edge.generator.calls}) == 1
    assert len(edge.generator.calls) == 6


async def test_a_key_of_the_command_line_is_one_too(tenants: Tenants) -> None:
    salts = []
    for key in ("one", "two", "one"):
        tenants.keys["flag"] = key
        salts.append((await tenants.ask(make_edge(says("Hello"), api_key=key), "flag")).cache_salt)
    assert salts[0] == salts[2] != salts[1]
    assert all(salts)


async def test_a_name_that_is_given_again_gets_nothing_of_the_key_before(tenants: Tenants) -> None:
    before = (await tenants.ask(tenants.router(), "a")).cache_salt
    revoke_api_key(tenants.path, "a")
    tenants.keys["a"] = add_api_key(tenants.path, "a")
    assert (await tenants.ask(tenants.router(), "a")).cache_salt != before


@pytest.mark.parametrize("sharing", PrefixSharing)
async def test_sessions_are_kept_whoever_shares(tenants: Tenants, sharing: str) -> None:
    edge = tenants.router(prefix_sharing=sharing)
    first, second, other = [(await tenants.ask(edge, one)).session for one in ("a", "a", "b")]
    assert first == second != other


@pytest.mark.parametrize(
    ("sharing", "asked", "is_needed"),
    [("key", "", False), ("key", "s", True), ("none", "", True), ("all", "s", True)],
)
async def test_what_a_client_or_none_asks_for_needs_nodes_that_know_it(
    tenants: Tenants, sharing: str, asked: str, is_needed: bool
) -> None:
    """Nodes of the release before share all KV; where routers are replaced first, they serve on."""
    edge = tenants.router(prefix_sharing=sharing)
    assert (await tenants.ask(edge, "a", cache_salt=asked)).needs_salt is is_needed


async def test_a_salt_says_nothing_of_its_key(
    tenants: Tenants, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    edge = tenants.router()
    salt = (await tenants.ask(edge, "a", cache_salt="my own")).cache_salt
    digest = hash_api_key(tenants.keys["a"].encode())
    assert len(salt) == 32
    for secret in (tenants.keys["a"], digest, "my own"):
        assert secret not in salt
        assert secret not in caplog.text
    assert not any(digest[at : at + 8] in salt for at in range(57))
    assert salt not in caplog.text


def test_no_two_owners_have_one_salt() -> None:
    salts = {PrefixSharing.KEY.salt(key, asked) for key in KEYS for asked in ASKED}
    assert len(salts) == len(KEYS) * len(ASKED)
    assert all(len(salt) <= MAX_SALT_CHARS for salt in salts)
