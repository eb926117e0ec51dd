"""Grammars that become ready when a test says so. See interfaces.grammars.Grammars."""

from __future__ import annotations

import os
from collections import Counter

from fastdeploy_sd.types import RequestId
from fastdeploy_sd.types.stats import GrammarStats


class ToyGrammars:
    """Attributes:
    users: grammar -> requests that hold it.
    ready: those that are compiled. errors: grammar -> why it cannot be.
    masked: requests to announce.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.users: Counter[str] = Counter()
        self.ready: set[str] = set()
        self.errors: dict[str, str] = {}
        self._prepared: list[str] = []
        self.masked: list[RequestId] = []

    def finish(self, grammar: str, error: str = "") -> None:
        """End a preparation."""
        if error:
            self.errors[grammar] = error
        else:
            self.ready.add(grammar)
        self._prepared.append(grammar)
        os.eventfd_write(self.fd, 1)

    def prepare(self, grammar: str) -> None:
        self.users[grammar] += 1

    def release(self, grammar: str) -> None:
        self.users[grammar] -= 1
        assert self.users[grammar] >= 0, f"{grammar} was released too often"

    def is_ready(self, grammar: str) -> bool:
        return grammar in self.ready

    def error_of(self, grammar: str) -> str:
        return self.errors.get(grammar, "")

    def take_prepared(self) -> list[str]:
        if self._prepared:
            os.eventfd_read(self.fd)
        prepared, self._prepared = self._prepared, []
        return prepared

    def announce(self, request_id: RequestId) -> None:
        self.masked.append(request_id)
        os.eventfd_write(self.fd, 1)

    def take_masked(self) -> list[RequestId]:
        if self.masked:
            os.eventfd_read(self.fd)
        masked, self.masked = self.masked, []
        return masked

    def stats(self) -> GrammarStats:
        return GrammarStats(num_compiled=len(self.ready), num_failed=len(self.errors))

    def close(self) -> None:
        os.close(self.fd)
