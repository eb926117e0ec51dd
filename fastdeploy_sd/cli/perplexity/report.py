"""What was found of a text, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastdeploy_sd.cli.perplexity.scoring import Comparison
from fastdeploy_sd.cli.perplexity.statistics import Estimate
from fastdeploy_sd.types import F64


class Report:
    """Collects what windows gave; `against` None = there is no reference."""

    def __init__(self, model: str, against: str | None, context: int, stride: int) -> None:
        self._model, self._against, self._context, self._stride = model, against, context, stride
        self._nats: list[F64] = []
        self._compared: list[Comparison] = []
        self._num_bytes = 0

    def add(self, nats: F64, num_bytes: int, found: Comparison | None) -> None:
        """Take the scored tokens of a window and the bytes of these."""
        self._nats.append(nats)
        self._num_bytes += num_bytes
        if found is not None:
            self._compared.append(found)

    def to_json(self) -> dict[str, Any]:
        """Return everything by name; nats are natural logarithms."""
        nats = np.concatenate(self._nats)
        per_token = Estimate.of(nats)
        found: dict[str, Any] = {
            "model": self._model, "context": self._context, "stride": self._stride,
            "num_tokens": len(nats), "num_bytes": self._num_bytes,
            "nats_per_token": per_token.to_json(),
            "nats_per_byte": per_token.times(len(nats) / max(self._num_bytes, 1)).to_json(),
            "perplexity": math.exp(per_token.mean),
        }  # fmt: skip
        if self._compared:
            found["against"] = {"model": self._against} | self._comparison(nats)
        return found

    def _comparison(self, nats: F64) -> dict[str, Any]:
        reference = np.concatenate([part.reference_nats for part in self._compared])
        divergence = np.concatenate([part.divergence for part in self._compared])
        same_top = np.concatenate([part.same_top for part in self._compared]).astype(np.float64)
        return {
            "nats_per_token": Estimate.of(reference).to_json(),
            "difference": Estimate.of(nats - reference).to_json(),
            "kl_divergence": Estimate.of(divergence).to_json()
            | {"median": float(np.median(divergence)), "p99": float(np.quantile(divergence, 0.99))}
            | {"largest": float(divergence.max())},
            "same_top_token": Estimate.of(same_top).to_json(),
        }

    def table(self) -> str:
        """Return the numbers with their margins, a line each."""
        return "\n".join(self._lines(self.to_json()))

    def _lines(self, found: dict[str, Any]) -> Iterator[str]:
        yield (
            f"{found['model']}: {found['num_tokens']} tokens of {found['num_bytes']} bytes scored, windows of "
            f"{found['context']} tokens, {found['stride']} apart"
        )
        per_token = found["nats_per_token"]
        yield _line("nats per token", per_token)
        yield _line("nats per byte", found["nats_per_byte"])
        low, high = (math.exp(per_token["mean"] + sign * per_token["margin_95"]) for sign in (-1, 1))
        yield f"{'perplexity':<26}{found['perplexity']:10.4f}   {low:.4f} .. {high:.4f}"
        against = found.get("against")
        if against is None:
            return
        yield f"against {against['model']}"
        yield _line("its nats per token", against["nats_per_token"])
        yield _line("difference in nats", against["difference"], "+10.5f")
        divergence = against["kl_divergence"]
        yield _line("KL divergence, mean", divergence, "10.5f")
        for name, text in (("median", "median"), ("p99", "99 %"), ("largest", "largest")):
            yield f"{'KL divergence, ' + text:<26}{divergence[name]:10.5f}"
        same = {name: 100 * value for name, value in against["same_top_token"].items()}
        yield _line("same top token, %", same, "10.2f")


def _line(name: str, estimate: dict[str, float], form: str = "10.4f") -> str:
    margin = format(estimate["margin_95"], form.lstrip("+")).strip()
    return f"{name:<26}{format(estimate['mean'], form)} +- {margin}"
