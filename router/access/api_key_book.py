"""The valid API keys, with the requests that each has in progress; follows the file's changes."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path

from common.files.followed_files import FollowedFiles
from common.observing.clock import Clock
from router.access.api_keys import ApiKey, hash_api_key, load_api_keys
from router.access.key_limits import KeyLimits, Limit, Refusal

logger = logging.getLogger("pdserve.router.keys")

CHECK_EVERY_S = 1.0
FLAG_KEY_NAME = "--api-key"
"""The name of the configuration's key; no key in a file can have it."""


@dataclass(slots=True)
class KeyInUse:
    """A key, its limits, and the counts of its requests."""

    key: ApiKey
    limits: KeyLimits
    num_accepted: int = 0
    num_refused: dict[Limit, int] = field(default_factory=lambda: dict.fromkeys(Limit, 0))

    def refusal(self, now_s: float) -> Refusal | None:
        """Return why a request would be refused, and count it as refused; None: it may go on."""
        return self._counted(self.limits.refusal(now_s))

    def take(self, now_s: float) -> Refusal | None:
        """Admit or refuse a request like `KeyLimits.take`, and count it."""
        refusal = self._counted(self.limits.take(now_s))
        self.num_accepted += refusal is None
        return refusal

    def _counted(self, refusal: Refusal | None) -> Refusal | None:
        if refusal is not None:
            self.num_refused[refusal.limit] += 1
        return refusal


class ApiKeyBook:
    """All valid keys. Used on the event loop; its state is one entry per key.

    The file is checked for changes when a key is looked up, at most once a second, so a revoked key
    stops working without a restart. Its requests in progress continue to their end. If a new file
    is broken or missing, that is logged once, and the old keys stay valid.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        path: Path | None = None,
        api_key: str = "",
        metrics_token: str = "",
        open_api: bool = False,
    ) -> None:
        """Read the keys.

        `path`: the file of keys; `api_key`: one more key, in clear, an administrator's;
        `metrics_token`: the token that Prometheus sends, for `/metrics` alone; `open_api`: clients
        are served without a key, and only administrators need one. Raises `ConfigError`.
        """
        self._open_api = open_api
        self._clock = clock
        self._path = path
        self._api_key = api_key
        self._metrics_token = metrics_token.encode()
        self._keys: dict[str, KeyInUse] = {}
        self._checked_at_s = clock.now_s()
        self._file = FollowedFiles(
            [path] if path else [], logger, stays="the API keys stay unchanged"
        )
        self._take_over(load_api_keys(path) if path else ())

    @property
    def is_open(self) -> bool:
        """Whether clients are served without a key."""
        return self._open_api or not self._has_keys

    @property
    def _has_keys(self) -> bool:
        return self._path is not None or bool(self._api_key)

    def key_when_open(self, given: bytes) -> ApiKey:
        """Return the key that a client sent, or one without a name and a digest.

        Without any keys everyone is an administrator.
        """
        used = self.find(given) if given else None
        return used.key if used else ApiKey(name="", sha256="", is_admin=not self._has_keys)

    def find(self, given: bytes) -> KeyInUse | None:
        """Return the key that a client sent.

        It is looked up by its hash, so the time that takes reveals nothing about it.
        """
        self._follow_file()
        return self._keys.get(hash_api_key(given))

    def is_metrics_token(self, given: bytes) -> bool:
        """Return whether this is the token for `/metrics`; compares in constant time."""
        return bool(self._metrics_token) and hmac.compare_digest(given, self._metrics_token)

    def refusal(self, used: KeyInUse) -> Refusal | None:
        """Return why a request of this key is refused before its body is read; None: it is not."""
        return used.refusal(self._clock.now_s())

    def take(self, used: KeyInUse) -> Refusal | None:
        """Admit a request of this key, or return why not; after None, `release` must be called."""
        return used.take(self._clock.now_s())

    def in_use(self) -> tuple[KeyInUse, ...]:
        """Return all valid keys."""
        return tuple(self._keys.values())

    def _follow_file(self) -> None:
        path, now_s = self._path, self._clock.now_s()
        if path is None or now_s - self._checked_at_s < CHECK_EVERY_S:
            return
        self._checked_at_s = now_s
        keys = self._file.read_if_changed(lambda: load_api_keys(path))
        if keys is None:
            return
        self._take_over(keys)
        logger.info("%s changed: %d API keys are valid now", path, len(keys))

    def _take_over(self, keys: tuple[ApiKey, ...]) -> None:
        old, self._keys = self._keys, {}
        for key in (*self._flag_key(), *keys):
            self._keys[key.sha256] = self._renewed(key, old.get(key.sha256))

    def _flag_key(self) -> tuple[ApiKey, ...]:
        if not self._api_key:
            return ()
        digest = hash_api_key(self._api_key.encode())
        return (ApiKey(name=FLAG_KEY_NAME, sha256=digest, is_admin=True),)

    def _renewed(self, key: ApiKey, known: KeyInUse | None) -> KeyInUse:
        wanted = {
            "requests_per_minute": key.requests_per_minute,
            "max_concurrent": key.max_concurrent,
        }
        if known is None:
            return KeyInUse(key, KeyLimits(**wanted, now_s=self._clock.now_s()))
        known.limits.change(**wanted, now_s=self._clock.now_s())
        known.key = key
        return known
