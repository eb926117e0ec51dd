"""Keeps control tokens that a message spells from acting, while a chat template works with the message.

Before rendering, each one is replaced by a placeholder that cannot be guessed; afterwards it is put back. A template
that looks for a control token (`'</think>' in content`, `content.split('</think>')`) finds its placeholder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.requests import prompt_too_long
from fastdeploy_sd.text.call_arguments import Arguments

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Shield:
    """The placeholders of one rendering.

    Args:
        control: finds the texts of control tokens.
        beginnings: of those texts, without the whole ones.
        limit: how many control tokens messages may spell, None = any number.

    Attributes:
        end_mark: stands for no text; it cannot be guessed.
    """

    def __init__(self, control: re.Pattern[str], beginnings: Collection[str], limit: int | None) -> None:
        self._control = control
        self._beginnings = beginnings
        self._limit = limit
        self._num_found = 0
        self._longest = max(map(len, beginnings), default=0)
        # Digits survive `upper`, `lower` and `tojson`. The borders, two random private-use characters, show a cut.
        self._nonce = str(secrets.randbits(128))
        self._open, self._close = map(chr, secrets.SystemRandom().sample(_PRIVATE_USE, 2))
        self._placeholders: dict[str, str] = {}  # of each text, in the order in which they were first found
        self.end_mark = self.mark("end")
        self._placeholder = re.compile(f"{self._open}{self._nonce}:([0-9]+){self._close}")

    def mark(self, name: str) -> str:
        """Return a random text that stands for none; it must not be left in what a template wrote."""
        return f"{self._open}{self._nonce}:{name}{self._close}"

    def cover(self, value: Any) -> Any:
        """Return a JSON value with each control token in each of its texts replaced by a placeholder.

        The beginning of a token at the end of a text is replaced too, as the next text could be its rest.

        Raises:
            BadRequest: there are more than the limit.
        """
        if isinstance(value, str):
            return type(value)(self._cover_end(self._control.sub(self._cover_match, value)))
        if isinstance(value, Mapping):
            covered = {self.cover(key): self.cover(item) for key, item in value.items()}
            return Arguments(covered, self.cover(value.text)) if isinstance(value, Arguments) else covered
        if isinstance(value, Sequence):
            return [self.cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """Put the originals back.

        Raises:
            BadRequest: the template cut a placeholder in two.
        """
        originals = [*self._placeholders]
        restored = self._placeholder.sub(lambda m: originals[int(m[1])], text)
        if originals and any(part in restored for part in (self._open, self._close, self._nonce)):
            raise BadRequest("messages: the chat template cuts a message inside a control token", param="messages")
        return restored

    def as_spelled(self, wanted: str, text: str) -> str:
        """Return what a template has to look for to find `wanted` in a text that may come from a message."""
        covered = self._control.sub(lambda m: self._placeholders.get(m[0], m[0]), wanted)
        return covered if covered in text else wanted

    def _cover_end(self, text: str) -> str:
        words = text.rstrip()  # a template may trim it
        for n in range(min(self._longest, len(words)), 0, -1):
            if words[-n:] in self._beginnings:
                return words[:-n] + self._placeholder_of(words[-n:]) + text[len(words) :]
        return text

    def _cover_match(self, match: re.Match[str]) -> str:
        self._num_found += 1
        if self._limit is not None and self._num_found > self._limit:
            raise prompt_too_long(self._limit + 1, "more than that of control tokens in messages", param="messages")
        return self._placeholder_of(match[0])

    def _placeholder_of(self, original: str) -> str:
        new = f"{self._open}{self._nonce}:{len(self._placeholders)}{self._close}"
        return self._placeholders.setdefault(original, new)


_ACTIVE: ContextVar[Shield | None] = ContextVar("shield", default=None)


@contextmanager
def rendering_with(shield: Shield) -> Iterator[None]:
    """Have `wanted_in` use this shield in the block."""
    token = _ACTIVE.set(shield)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def wanted_in(text: object, wanted: Any) -> Any:
    """Return what to look for in `text` to find `wanted`; anything but two texts is left as it is."""
    shield = _ACTIVE.get()
    if shield is None or not isinstance(text, str) or not isinstance(wanted, str):
        return wanted
    return shield.as_spelled(wanted, text)
