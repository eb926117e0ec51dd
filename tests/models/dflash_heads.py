"""Random DFlash drafters for golden models, besides the EAGLE heads, and what they must draft: NumPy in float64.

A block of drafts stands at the positions of its tokens, and the target's rows at their own, as z-lab has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdeploy_sd.types import F32, I32
from tests.models import eagle_heads
from tests.models.eagle_heads import F64, Draft, EagleHead, Head, normed
from tests.models.mtp_models import random_like

_BLOCK, _WINDOW = 8, 12


@dataclass(frozen=True)
class DFlashKind(Head):
    """One way of writing a drafter.

    Attributes:
        windows: of its layers, None = all tokens are seen.
        from_newest: the newest token's row makes a draft too.
        in_order: in layers with a window, rows see only those before them.
    """

    windows: tuple[int | None, ...] = (None,)
    from_newest: bool = False
    in_order: bool = True


_TYPES = ["full_attention", "sliding_attention"]
_OF_Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": _BLOCK,
    "num_target_layers": 3,
    "layer_types": _TYPES,
    "sliding_window": _WINDOW,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 2]},
}
DFLASH: Mapping[str, DFlashKind] = {
    "dflash": DFlashKind(
        "dflash", (1, 3), num_layers=2, layer="layers.0", has_qk_norm=True, config=_OF_Z_LAB, mask_token=9,
        windows=(None, _WINDOW),
    ),
    "dflash of speculators": DFlashKind(
        "dflash", (1, 2, 3), draft_vocab=300, num_layers=2, layer="layers.0", has_qk_norm=True, mask_token=3,
        config={
            "speculators_model_type": "dflash",
            "block_size": _BLOCK,
            "aux_hidden_state_layer_ids": [0, 1, 2],
            "mask_token_id": 3,
            "sample_from_anchor": True,
            "sliding_window_non_causal": True,
        },
        is_nested=True, windows=(None, None), from_newest=True, in_order=False,
    ),
}  # fmt: skip
HEADS: Mapping[str, Head] = {**eagle_heads.HEADS, **DFLASH}


class DFlashHead(EagleHead):
    """A drafter in a folder, for the golden model `target`."""

    head: DFlashKind

    def _random_parts(self, rng: np.random.Generator, target_width: int, draft_vocab: int) -> dict[str, F32]:
        head, h = self.head, self._width
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, len(head.taps) * target_width)}
        shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (h,))
        for i in range(head.num_layers):
            shapes |= {f"{i}.{name}": shape for name, shape in self._layer_shapes(i).items()}
            shapes[f"{i}.input_layernorm.weight"] = (h,)
        if head.draft_vocab is not None:
            shapes["lm_head.weight"] = (draft_vocab, h)
        return {name: random_like(rng, np.zeros(shape)) for name, shape in shapes.items()}

    def hidden(self, token_ids: I32) -> F64:
        """Return what the drafter keeps of the target's rows, [T, H]."""
        return normed(super().hidden(token_ids), self._parts["hidden_norm.weight"])

    def drafts(self, text: I32, count: int, hidden: F64) -> Draft:
        """Return the drafts after a text; `hidden`: of all its tokens but the last."""
        head, w, n = self.head, self._parts, len(hidden)
        num_rows = count + (not head.from_newest)
        assert head.mask_token is not None
        stream = self._embedding[np.append(text[-1:], np.full(num_rows - 1, head.mask_token))]
        for i in range(head.num_layers):
            attended = np.concatenate([hidden, normed(stream, w[f"{i}.input_layernorm.weight"])])
            stream = stream + self._attention(attended, i, self._seen(n + num_rows, head.windows[i]))[n:]
            stream = stream + self._feed_forward(stream, i)
        logits = normed(stream, w["norm.weight"])[num_rows - count :] @ self._lm_head.T
        best, second = np.sort(logits, axis=1)[:, -1], np.sort(logits, axis=1)[:, -2]
        weights = np.exp(logits - best[:, None]).sum(axis=1)
        margin = float((best - second).min(initial=np.inf))
        return Draft(self._tokens[logits.argmax(axis=1)].tolist(), margin, (-np.log(weights)).tolist())

    def _seen(self, n: int, window: int | None) -> np.ndarray:
        """Rows of the text are of no interest."""
        if window is None:
            return np.ones((n, n), bool)
        distance = np.arange(n)[:, None] - np.arange(n)
        return (distance >= 0) & (distance < window)


def make_head(folder: Path, name: str, target: str = "llama-tiny") -> EagleHead:
    """Write one of HEADS to folder/name."""
    if name not in DFLASH:
        return eagle_heads.make_head(folder, name, target)
    return DFlashHead(folder / name.replace(" ", "-"), DFLASH[name], target, seed=len(name))
