"""Random EAGLE heads for golden models, as their trainers write them, and what they must draft: NumPy in float64.

The expectation is computed from the weights as they were made, by role, and not from a loader's reading of the files.
Rows stand at the position of the hidden row, as the papers have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.types import F32, I32
from tests.models import golden, rewrite
from tests.models.mtp_models import random_like
from tests.models.numpy_decoder import NumpyDecoder

F64 = npt.NDArray[np.floating[Any]]
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _INNER, _EPS = 4, 2, 16, 48, 1e-5


@dataclass(frozen=True)
class Head:
    """One way of writing a head.

    Attributes:
        method: that runs it.
        taps: the layers whose input is read; () = the target's rows after its final norm.
        hidden: its own width; None = the target's.
        draft_vocab: None = the target's tokens.
        layer: prefix of its first decoder layer.
        norms: of what fc reads: "", "whole" or "each".
        theta: base of its rotary embedding, as computed.
        config: keys of config.json besides the sizes.
        is_nested: the sizes are in the container of speculators.
        mask_token: of P-EAGLE's further rows; None = drafts are made one by one.
    """

    method: str
    taps: tuple[int, ...] = ()
    hidden: int | None = None
    draft_vocab: int | None = None
    num_layers: int = 1
    layer: str = "midlayer"
    has_bias: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    norms: str = ""
    norm_before_residual: bool = False
    feeds_normed: bool = False
    theta: float = 10_000.0
    config: Mapping[str, Any] = field(default_factory=dict)
    is_nested: bool = False
    mask_token: int | None = None


EAGLE3: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
_TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 2], "return_hidden_post_norm": False}}
HEADS: Mapping[str, Head] = {
    "eagle": Head("eagle", layer="layers.0", has_bias=True, config={"architectures": ["LlamaForCausalLM"]}),
    "eagle of qwen": Head(
        "eagle",
        layer="model.layers.0",
        has_qkv_bias=True,
        theta=5e5,
        config={"architectures": ["LlamaForCausalLMEagle"], "bias": False, "rope_theta": 5e5},
    ),
    "eagle3": Head("eagle3", (2, 1, 0), draft_vocab=100, config=EAGLE3),
    "eagle3 of SGLang": Head("eagle3", (1, 1, 3), hidden=64, norms="whole", has_bias=True, config=EAGLE3 | _TAPS),
    "eagle3 of speculators": Head(
        "eagle3",
        (1, 2),
        draft_vocab=300,
        layer="layers.0",
        has_qk_norm=True,
        norms="each",
        norm_before_residual=True,
        feeds_normed=True,
        config={
            "speculators_model_type": "eagle3",
            "norm_output": True,
            "fc_norm": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2],
        },
        is_nested=True,
    ),
    "eagle3 of two layers": Head("eagle3", (2, 1, 0), draft_vocab=100, num_layers=2, config=EAGLE3),
    "p-eagle": Head(
        "eagle3",
        (2, 1, 0),
        hidden=128,
        draft_vocab=100,
        num_layers=2,
        norms="whole",
        config=EAGLE3 | {"ptd_token_id": 4000},
        mask_token=4000,
    ),
    "p-eagle of speculators": Head(
        "eagle3",
        (1, 2),
        draft_vocab=300,
        num_layers=3,
        layer="layers.0",
        norms="each",
        has_bias=True,
        has_qk_norm=True,
        norm_before_residual=True,
        config={
            "speculators_model_type": "peagle",
            "fc_norm": True,
            "mask_token_id": 7,
            "eagle_aux_hidden_state_layer_ids": [1, 2],
        },
        is_nested=True,
        mask_token=7,
    ),
}  # fmt: skip


class Draft(NamedTuple):
    """What is drafted, by how much the least sure draft's logit leads, and the drafts' log-probabilities."""

    token_ids: list[int]
    margin: float
    logprobs: list[float]


class EagleHead:
    """A head in a folder, for the golden model `target`."""

    def __init__(self, folder: Path, head: Head, target: str, seed: int = 0) -> None:
        self.path, self.head = folder, head
        self._target = NumpyDecoder(target, "float32", "float32")
        weights = self._target.weights
        self._table = widen(weights.embedding().data).astype(np.float64)
        vocab_size, target_width = self._table.shape
        self._width = target_width if head.hidden is None else head.hidden
        rng = np.random.default_rng(seed)
        draft_vocab = head.draft_vocab or vocab_size
        self._tokens = np.sort(rng.permutation(vocab_size)[:draft_vocab]).astype(np.int64)
        self._parts = self._random_parts(rng, target_width, draft_vocab)
        has_own = head.hidden is not None
        self._embedding = self._parts["embed_tokens.weight"].astype(np.float64) if has_own else self._table
        lm_head = self._parts.get("lm_head.weight")
        self._lm_head = widen(weights.lm_head().to_array() if lm_head is None else lm_head).astype(np.float64)
        self._write(target, vocab_size, target_width)

    def _random_parts(self, rng: np.random.Generator, target_width: int, draft_vocab: int) -> dict[str, F32]:
        """Weights by role; those of decoder layers begin with their number."""
        head, h, is_third = self.head, self._width, self.head.method == "eagle3"
        taps = len(head.taps) * target_width if is_third else 2 * h
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, taps)}
        shapes |= {"fc.bias": (h,)} if head.has_bias else {}
        for i in range(head.num_layers):
            shapes |= {f"{i}.{name}": shape for name, shape in self._layer_shapes(i).items()}
        if is_third:
            shapes |= {"norm.weight": (h,), "lm_head.weight": (draft_vocab, h)}
        if head.hidden is not None:
            shapes["embed_tokens.weight"] = (len(self._table), h)
        if head.mask_token is not None:
            shapes["mask_hidden"] = (1, 1, taps)
        if head.norms == "whole":
            shapes["input_norm.weight"] = (taps,)
        if head.norms == "each":
            shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(len(head.taps))}
        return {name: random_like(rng, np.zeros(shape)) for name, shape in shapes.items()}

    def _layer_shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        head, h, is_third = self.head, self._width, self.head.method == "eagle3"
        inputs = 2 * h if is_third and i == 0 else h
        shapes: dict[str, tuple[int, ...]] = {}
        for name, num_heads in (("q", _NUM_HEADS), ("k", _NUM_KV_HEADS), ("v", _NUM_KV_HEADS)):
            shapes[f"self_attn.{name}_proj.weight"] = (num_heads * _HEAD_DIM, inputs)
            shapes |= {f"self_attn.{name}_proj.bias": (num_heads * _HEAD_DIM,)} if head.has_qkv_bias else {}
            shapes |= {f"self_attn.{name}_norm.weight": (_HEAD_DIM,)} if head.has_qk_norm and name != "v" else {}
        shapes["self_attn.o_proj.weight"] = (h, _NUM_HEADS * _HEAD_DIM)
        shapes |= {f"mlp.{name}_proj.weight": (_INNER, h) for name in ("gate", "up")}
        shapes |= {"mlp.down_proj.weight": (h, _INNER), "post_attention_layernorm.weight": (h,)}
        shapes |= {"input_layernorm.weight": (h,)} if is_third or i else {}
        return shapes | ({"hidden_norm.weight": (h,)} if is_third and i == 0 else {})

    def _write(self, target: str, vocab_size: int, target_width: int) -> None:
        head = self.head
        sizes: dict[str, Any] = {
            "num_hidden_layers": head.num_layers, "hidden_size": self._width, "intermediate_size": _INNER,
            "hidden_act": "silu", "num_attention_heads": _NUM_HEADS, "num_key_value_heads": _NUM_KV_HEADS,
            "head_dim": _HEAD_DIM, "rms_norm_eps": _EPS, "vocab_size": vocab_size, "max_position_embeddings": 64,
        }  # fmt: skip
        config: dict[str, Any] = {"transformer_layer_config": sizes} if head.is_nested else sizes
        config |= dict(head.config)
        if head.draft_vocab is not None:
            config["draft_vocab_size"] = head.draft_vocab
        if head.hidden is not None:
            config["target_hidden_size"] = target_width
        tensors: rewrite.Tensors = {self._published(name): value for name, value in self._parts.items()}
        if head.method == "eagle" and head.hidden is None:  # as such heads are published
            tensors["embed_tokens.weight"] = rewrite.read(target)["model.embed_tokens.weight"]
        if head.draft_vocab is not None:
            tensors["d2t"] = self._tokens - np.arange(len(self._tokens))
            tensors["t2d"] = np.isin(np.arange(vocab_size), self._tokens)
        self.path.mkdir(parents=True)
        (self.path / "config.json").write_text(json.dumps(config))
        rewrite.write_file(self.path / "model.safetensors", tensors, {"format": "pt"})

    def _published(self, name: str) -> str:
        number, _, part = name.partition(".")
        if not number.isdigit():
            return name
        return f"{self.head.layer if number == '0' else f'layers.{number}'}.{part}"

    def hidden(self, token_ids: I32) -> F64:
        """Return what the head keeps of the target's rows, [T, H]."""
        head = self.head
        if not head.taps:
            return self._target.hidden(token_ids).astype(np.float64)
        stream: F32 = widen(self._target.weights.embedding().data)[token_ids]
        streams = []
        num_layers = max(head.taps)
        for i in range(num_layers + 1):
            streams.append(stream)
            stream = stream if i == num_layers else self._target.layer(stream, i)
        return self._combined([streams[layer].astype(np.float64) for layer in head.taps])

    def _combined(self, rows: list[F64]) -> F64:
        """[T, H of the target] of each layer that is read -> what the head keeps [T, H]."""
        head, w = self.head, self._parts
        if head.norms == "each":
            rows = [normed(row, w[f"fc_norm.{i}.weight"]) for i, row in enumerate(rows)]
        row: F64 = np.concatenate(rows, axis=1)
        if head.norms == "whole":
            row = normed(row, w["input_norm.weight"])
        return row @ w["fc.weight"].T + w.get("fc.bias", 0.0)

    def drafts(self, text: I32, count: int, hidden: F64) -> Draft:
        """Return the drafts after a text of at least two tokens; `hidden`: of all its tokens but the last."""
        found, logprobs, margin = list[int](), list[float](), np.inf
        for _ in range(count):
            logits, chained = self._run(text[1:], hidden)
            found.append(int(self._tokens[logits.argmax()]))
            logprobs.append(-float(np.log(np.exp(logits - logits.max()).sum())))
            margin = min(margin, float(logits.max() - np.partition(logits, -2)[-2]))
            token, row = (found[-1], chained) if self.head.mask_token is None else (self.head.mask_token, self._mask())
            text, hidden = np.append(text, token).astype(np.int32), np.concatenate([hidden, row])
        return Draft(found, margin, logprobs)

    def _mask(self) -> F64:
        """Return the row [1, H] of P-EAGLE in place of one that is not known yet."""
        return self._combined(np.split(self._parts["mask_hidden"][0].astype(np.float64), len(self.head.taps), axis=1))

    def _run(self, token_ids: I32, hidden: F64) -> tuple[F64, F64]:
        """Return the logits of the last row, and what the next draft reads [1, H]."""
        head, w = self.head, self._parts
        embedded = self._embedding[token_ids]
        if head.method == "eagle":
            attended = stream = np.concatenate([embedded, hidden], axis=1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        else:
            normed_hidden = normed(hidden, w["0.hidden_norm.weight"])
            attended = np.concatenate([normed(embedded, w["0.input_layernorm.weight"]), normed_hidden], axis=1)
            stream = normed_hidden if head.norm_before_residual else hidden
        for i in range(head.num_layers):
            attended = attended if i == 0 else normed(stream, w[f"{i}.input_layernorm.weight"])
            stream = stream + self._attention(attended, i)
            stream = stream + self._feed_forward(stream, i)
        stream = stream[-1:]
        output = normed(stream, w["norm.weight"]) if head.method == "eagle3" else stream
        return (output @ self._lm_head.T)[0], output if head.feeds_normed else stream

    def _feed_forward(self, stream: F64, i: int) -> F64:
        w = self._parts
        inner = normed(stream, w[f"{i}.post_attention_layernorm.weight"])
        gate = inner @ w[f"{i}.mlp.gate_proj.weight"].T
        found: F64 = gate / (1 + np.exp(-gate)) * (inner @ w[f"{i}.mlp.up_proj.weight"].T)
        return found @ w[f"{i}.mlp.down_proj.weight"].T

    def _attention(self, x: F64, i: int, seen: npt.NDArray[np.bool_] | None = None) -> F64:
        """`seen`: [T, T], which rows each one sees; None = itself and those before it."""
        w, head, n = self._parts, self.head, len(x)
        qkv: list[F64] = [
            (x @ w[f"{i}.self_attn.{p}_proj.weight"].T + w.get(f"{i}.self_attn.{p}_proj.bias", 0.0)).reshape(
                n, -1, _HEAD_DIM
            )
            for p in "qkv"
        ]
        q, k, v = qkv
        if head.has_qk_norm:
            q, k = (normed(heads, w[f"{i}.self_attn.{p}_norm.weight"]) for heads, p in ((q, "q"), (k, "k")))
        angles = np.arange(n)[:, None] * head.theta ** -(np.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        q, k = (
            np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
            for a, b in (np.split(part, 2, axis=2) for part in (q, k))
        )
        k, v = (np.repeat(part, _NUM_HEADS // _NUM_KV_HEADS, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * _HEAD_DIM**-0.5
        scores = np.where(np.tri(n, dtype=bool) if seen is None else seen, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        rows = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
        found: F64 = rows @ w[f"{i}.self_attn.o_proj.weight"].T
        return found


def normed(x: F64, weight: F32) -> F64:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + _EPS) * weight


def make_head(folder: Path, name: str, target: str = "llama-tiny") -> EagleHead:
    """Write one of HEADS to folder/name."""
    return EagleHead(folder / name.replace(" ", "-"), HEADS[name], target, seed=len(name))


def target_path(target: str = "llama-tiny") -> str:
    return str(golden.ROOT / target)
