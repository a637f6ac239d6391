"""Which requests share KV: the salt of a request, made of its API key and its `cache_salt`.

The salt is a part of every block's hash. So it isolates in every tier of every node, in pulls and
handoffs, and in what routers know of nodes, and none of these knows of keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import StrEnum

_SALT_BYTES = 16
_PURPOSE = b"pdserve prefix sharing\0"


class PrefixSharing(StrEnum):
    """Which requests may use each other's KV."""

    KEY = "key"
    NONE = "none"
    ALL = "all"

    def salt(self, api_key_sha256: str, asked: str) -> str:
        """Return the salt of one request; empty: that of all who have neither a key nor a salt.

        `api_key_sha256` is the digest under which routers store the request's API key, empty where
        it has none; `asked` is the client's own salt. Routers that know the same keys agree.
        """
        match self:
            case PrefixSharing.ALL:
                return asked
            case PrefixSharing.NONE:
                return secrets.token_hex(_SALT_BYTES)
            case PrefixSharing.KEY if not (api_key_sha256 or asked):
                return ""
            case PrefixSharing.KEY:
                # A client's salt is hashed also without a key, so that none can be another's.
                text = _PURPOSE + asked.encode("utf-8", "surrogatepass")
                digest = hmac.digest(bytes.fromhex(api_key_sha256), text, hashlib.sha256)
                return digest[:_SALT_BYTES].hex()

    def needs_salt(self, asked: str) -> bool:
        """Return whether nodes that know no salts are left out; `asked` is the client's own salt.

        They are of the release before, and had shared KV among all keys until now. Leaving them out
        would leave clients without nodes where routers are replaced first.
        """
        return self is PrefixSharing.NONE or bool(asked)
