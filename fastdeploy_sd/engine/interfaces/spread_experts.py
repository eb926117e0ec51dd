"""The engine's view of experts that are spread over ranks. Owns the interface; knows no implementation."""

from __future__ import annotations

from typing import Protocol

from fastdeploy_sd.types.experts import ExpertReport, ExpertStats


class SpreadExperts(Protocol):
    """Where experts are, and what they have to do. No call waits for a move."""

    def stats(self) -> ExpertStats: ...

    def report(self, *, clears: bool = False) -> ExpertReport:
        """Return what is known; `clears`: rows are counted anew for later reports."""

    def rearrange(self) -> None:
        """Place the experts anew, by the rows since the last time.

        Raises BadRequest: experts stay where they are, or another engine places them, or they are being placed.
        """
