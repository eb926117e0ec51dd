"""Tells the log per minute what drafting brings, and once if a drafter seems to be read wrongly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from fastdeploy_sd.config import Config, drafter_advice
from fastdeploy_sd.types.stats import EngineStats

_log = logging.getLogger(__name__)
_SECONDS_PER_LINE = 60.0


class DraftLog:
    """Writes a line while tokens are generated; a server that only decodes plainly writes none."""

    def __init__(self, config: Config) -> None:
        self._config, self._before = config, EngineStats()
        self._has_warned = False
        self._next_line = time.monotonic() + _SECONDS_PER_LINE

    def note_step(self, read_stats: Callable[[], EngineStats]) -> None:
        """Write the line if it is time to; `read_stats` gives the engine's and is called once per line."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _SECONDS_PER_LINE
            stats = read_stats()
            if line := summary(stats, self._before):
                _log.info(line)
            self._before = stats
            if stats.misread_drafter and not self._has_warned:
                self._has_warned = True
                _log.warning(drafter_advice(self._config, stats.misread_drafter))


def summary(now: EngineStats, before: EngineStats) -> str:
    """Return what drafts brought between two moments; "" = no tokens were generated, or drafts were not thought of."""
    num_steps = now.num_token_steps - before.num_token_steps
    accepted, then = _accepted(now), _accepted(before)
    if not num_steps or (now.choice is None and now.num_verified_rows == before.num_verified_rows):
        return ""
    rates = {source: (count - then.get(source, 0)) / num_steps for source, count in accepted.items()}
    told = ", ".join(f"{source} {rate:.2f}" for source, rate in sorted(rates.items(), key=lambda r: -r[1]) if rate)
    per_step = (now.num_generated_tokens - before.num_generated_tokens) / num_steps
    return f"drafts: {per_step:.2f} tokens per step, of these by source: {told or 'none'}{_choices(now, before)}"


def _choices(now: EngineStats, before: EngineStats) -> str:
    """Return what a method that chooses chose, "" where there is none."""
    if now.choice is None:
        return ""
    then: Mapping[str, int] = {} if before.choice is None else before.choice.num_steps
    counts = {name: count - then.get(name, 0) for name, count in now.choice.num_steps.items()}
    chosen = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    gain = f"{now.choice.gain:.2f} times plain decoding" if now.choice.gain else "not known yet"
    return f"; gain {gain}; steps by choice: {chosen or 'none'}"


def _accepted(stats: EngineStats) -> dict[str, int]:
    return {source: sum(counts.accepted) for source, counts in stats.drafts.items()}
