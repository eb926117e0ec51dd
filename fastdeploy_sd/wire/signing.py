"""Messages that prove who wrote them: HMAC-SHA256 with a key of the deployment. Knows no message and no secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

SIGNATURE_HEADER = "X-Fdsd-Signature"
_CHALLENGE_LIFE_S = 30.0


def sign(key: bytes, purpose: str, content: bytes) -> str:
    """Return the signature of `content` in hexadecimal digits; one for another purpose is another one."""
    return hmac.new(key, purpose.encode("ascii") + b"\0" + content, hashlib.sha256).hexdigest()


def is_signed(key: bytes, purpose: str, content: bytes, signature: str) -> bool:
    """Whether `signature` is what `sign` returns; takes as long for any."""
    return hmac.compare_digest(sign(key, purpose, content).encode(), signature.encode("utf-8", "replace"))


class Challenges:
    """Words that whoever registers must sign, so that what was signed for another router, or earlier, is worth nothing.

    A word says itself when it was made, under a key that nobody else has; only those that were used are remembered,
    and only while they would be valid. So asking for many costs nothing.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def make(self) -> str:
        """Return a new word."""
        text = f"{time.monotonic():.6f}.{secrets.token_hex(16)}"
        return f"{text}.{sign(self._key, 'challenge', text.encode())}"

    def use(self, word: str) -> bool:
        """Whether a word is ours, young and new; it is not the next time. Call it for authenticated messages only."""
        text, _, signature = word.rpartition(".")
        if not is_signed(self._key, "challenge", text.encode("utf-8", "replace"), signature):
            return False
        now = time.monotonic()
        self._used = {used: made for used, made in self._used.items() if now - made < _CHALLENGE_LIFE_S}
        made = float(text.rpartition(".")[0])
        if now - made >= _CHALLENGE_LIFE_S or word in self._used:
            return False
        self._used[word] = made
        return True
