"""Forms of the address of the placement store, and what is none."""

from __future__ import annotations

import pytest

from common.settings.redis_url import RedisUrl, Topology, parse_redis_url


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis://h", RedisUrl(topology=Topology.SERVER, hosts=(("h", 6379),))),
        ("redis://u:p@h:7/3?db=1", RedisUrl(topology=Topology.SERVER, hosts=(("h", 7),))),
        ("redis:///2", RedisUrl(topology=Topology.SERVER, hosts=(("localhost", 6379),))),
        (
            "rediss://[fd00::7]:7/0",
            RedisUrl(topology=Topology.SERVER, hosts=(("fd00::7", 7),), has_tls=True),
        ),
        ("unix:///run/redis.sock", RedisUrl(topology=Topology.SERVER, hosts=())),
        ("unix://u:p@/a%20b/s?db=3", RedisUrl(topology=Topology.SERVER, hosts=())),
        ("unix:///" + 106 * "x", RedisUrl(topology=Topology.SERVER, hosts=())),
        (
            "redis+sentinel://s1,s2:7,[::1]:8/main/2",
            RedisUrl(
                topology=Topology.SENTINEL,
                hosts=(("s1", 26379), ("s2", 7), ("::1", 8)),
                service="main",
                db=2,
            ),
        ),
        (
            "rediss+sentinel://me:p%40ss@s1/main",
            RedisUrl(
                topology=Topology.SENTINEL,
                hosts=(("s1", 26379),),
                has_tls=True,
                username="me",
                password="p@ss",
                service="main",
            ),
        ),
        (
            "rediss+cluster://:p@c1,c2:7/0",
            RedisUrl(
                topology=Topology.CLUSTER,
                hosts=(("c1", 6379), ("c2", 7)),
                has_tls=True,
                password="p",
            ),
        ),
    ],
)
def test_an_address_has_its_parts(url: str, parsed: RedisUrl) -> None:
    assert parse_redis_url(url) == parsed


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no scheme"),
        ("http://h", "no scheme"),
        ("redis+pigeon://h", "no scheme"),
        ("unix+cluster://h", "no scheme"),
        ("unix://", "absolute path"),
        ("unix:///", "absolute path"),
        ("unix://run/redis.sock", "absolute path"),
        ("unix:///" + 107 * "x", "108 bytes: wanted at most 107"),
        ("unix:///" + 54 * "%C3%A4", "109 bytes"),
        ("redis://h:0", "0 is no port"),
        ("redis://h:port", "Port"),
        ("redis://h/main", "'main' is no number"),
        ("redis://h/1/2", "'1/2' is no number"),
        ("redis+sentinel://h", "service's name is missing"),
        ("redis+sentinel://h/main/x", "invalid literal"),
        ("redis+sentinel://h,/main", "a host is missing"),
        ("redis+sentinel://h/main?socket_timeout=5", "options are only possible"),
        ("redis+cluster://", "a host is missing"),
        ("redis+cluster://h/3", "database 0 alone"),
        ("redis+cluster://h1,h2:99999", "Port out of range"),
        ("redis+cluster://" + ",".join(["h"] * 65), "65 hosts"),
    ],
)
def test_what_is_no_address_is_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_redis_url(url)
