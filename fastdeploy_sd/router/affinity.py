"""Which instances have seen the beginning of a prompt, so that their prefix caches may still hold it.

Bodies are not parsed: what counts are the bytes behind the key that holds the prompt, in blocks. Two clients that write
the same prompt differently miss each other, which costs time and nothing else. Knows no load.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence

_PROMPT = re.compile(rb'"(?:messages|prompt|prompt_token_ids)"\s*:\s*(?=[\["])')
_BLOCK_BYTES = 256
_MAX_BLOCKS = 64
_MAX_ENTRIES = 1 << 16
_MAX_INSTANCES = 4  # per beginning
_DIGEST_BYTES = 16


class PrefixTable:
    """Beginnings of prompts and the instances that got them last; the oldest ones are forgotten.

    Args:
        max_entries: beginnings it holds at most.
    """

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._secret = secrets.token_bytes(_DIGEST_BYTES)  # so that nobody can make two beginnings collide
        self._instances: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def keys_of(self, body: bytes) -> list[bytes]:
        """Return a key per whole block of the prompt in a body, each of everything up to there."""
        found = _PROMPT.search(body)
        if found is None:
            return []
        keys: list[bytes] = []
        digest = hashlib.blake2b(key=self._secret, digest_size=_DIGEST_BYTES)
        for number in range(min((len(body) - found.end()) // _BLOCK_BYTES, _MAX_BLOCKS)):
            start = found.end() + number * _BLOCK_BYTES
            digest.update(body[start : start + _BLOCK_BYTES])
            keys.append(digest.digest())
        return keys

    def preferred(self, keys: Sequence[bytes]) -> list[str]:
        """Return the instances that have seen any of this, the one with the longest part first."""
        found: dict[str, None] = {}
        for key in reversed(keys):
            found.update(dict.fromkeys(self._instances.get(key, ())))
        return list(found)

    def note(self, keys: Sequence[bytes], instance_id: str) -> None:
        """An instance gets a prompt."""
        for key in keys:
            others = [other for other in self._instances.pop(key, ()) if other != instance_id]
            self._instances[key] = (instance_id, *others[: _MAX_INSTANCES - 1])
        while len(self._instances) > self._max_entries:
            self._instances.popitem(last=False)

    def __len__(self) -> int:
        return len(self._instances)
