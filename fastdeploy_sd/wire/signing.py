"""Who wrote a message: HMAC-SHA256 with a key of the deployment, and challenges. Knows no message and no secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

NUM_MAC_BYTES = hashlib.sha256().digest_size
_CHALLENGE_LIFE_S = 30.0


def mac(key: bytes, purpose: str, content: bytes) -> bytes:
    """Return the signature of `content`; one for another purpose is another one."""
    return hmac.digest(key, purpose.encode() + b"\0" + content, hashlib.sha256)


def is_mac(key: bytes, purpose: str, content: bytes, signature: bytes) -> bool:
    """Whether `signature` is what `mac` returns; takes as long for any."""
    return hmac.compare_digest(mac(key, purpose, content), signature)


class Challenges:
    """Words that a registration must name, so that one for another router, or an earlier one, is worth nothing.

    A word says itself when it was made, under a key that only this object has. Only used words are remembered, and only
    while they would be valid, so asking for many costs nothing.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def make(self) -> str:
        """Return a new word."""
        text = f"{time.monotonic():.6f}.{secrets.token_hex(16)}"
        return f"{text}.{self._signature(text)}"

    def use(self, word: str) -> bool:
        """Whether a word is ours, young and new; it is not the next time. Call it for authenticated messages only."""
        text, _, signature = word.rpartition(".")
        if not hmac.compare_digest(self._signature(text).encode(), signature.encode("utf-8", "replace")):
            return False
        now = time.monotonic()
        self._used = {used: made for used, made in self._used.items() if now - made < _CHALLENGE_LIFE_S}
        made = float(text.rpartition(".")[0])
        if now - made >= _CHALLENGE_LIFE_S or word in self._used:
            return False
        self._used[word] = made
        return True

    def _signature(self, text: str) -> str:
        return mac(self._key, "challenge", text.encode("utf-8", "replace")).hex()
