"""Golden models extended with random MTP layers, and what those layers must draft: plain attention over the whole text.

The expectation is computed from the weights as they were made, by role, and not from their names in a checkpoint; rows
stand at the position of the hidden row, as the papers have it, and start over at 0.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.models.drafters.mtp_weights import HIDDEN_KEY, REFEED_KEY
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.reference.linear import read_input, stored_weight
from fastdeploy_sd.types import F32, I32
from tests.models import golden, rewrite
from tests.models.numpy_decoder import NumpyDecoder, normalize

HYBRIDS = ("qwen3_5-tiny", "qwen3_5_moe-tiny", "qwen3_next-tiny")
LAYOUTS = ("ernie-folder", "ernie-inside", "numbered", "numbered-own")


@dataclass(frozen=True)
class MtpParts:
    """One MTP layer's weights by role; None = the target's.

    Attributes:
        block: the decoder layer, by the names after `layers.<i>.`.
    """

    embedding_norm: F32
    hidden_norm: F32
    projection: F32
    block: rewrite.Tensors
    output_norm: F32 | None
    embedding: F32 | None
    head: F32 | None


@dataclass(frozen=True)
class Draft:
    """What a text must be continued with, and by how much each draft's logit leads."""

    token_ids: I32
    margins: F32


def make_model(folder: pathlib.Path, name: str, layout: str, num_layers: int = 1) -> MtpReference:
    """Write the golden model `name` with MTP layers to folder/model."""
    tensors, rng = rewrite.read(name), np.random.default_rng([num_layers, *name.encode()])
    config = json.loads((golden.ROOT / name / "config.json").read_text())
    first = config["num_hidden_layers"]
    # ERNIE's MTP layers are dense also in a mixture of experts; the others repeat the decoder's last layer.
    template = 0 if layout.startswith("ernie") else first - 1
    layers = [random_layer(rng, tensors, template, layout) for _ in range(num_layers)]
    folder.mkdir(exist_ok=True)
    path = rewrite.write_folder(folder / "model", name, {"num_nextn_predict_layers": num_layers})
    if layout == "ernie-folder":
        (path / "mtp").mkdir()
        kind = {"architectures": ["Ernie4_5_MTPForCausalLM"], "num_nextn_predict_layers": num_layers}
        (path / "mtp" / "config.json").write_text(json.dumps(config | kind if "ernie" in name else config))
        rewrite.write_file(path / "mtp" / "model.safetensors", ernie_names(layers, "ernie"), {"format": "pt"})
    elif layout == "ernie-inside":
        tensors |= ernie_names(layers, "model")
    elif layout == "qwen":
        tensors |= qwen_names(layers)
    else:
        tensors |= numbered_names(layers, first)
        if layout == "numbered":  # as such checkpoints have it: a copy of the target's table
            tensors |= {
                f"model.layers.{first + j}.embed_tokens.weight": tensors["model.embed_tokens.weight"]
                for j in range(num_layers)
            }
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    return MtpReference(path, write_blocks(folder / "blocks", name, layers), layers, config)


def random_layer(rng: np.random.Generator, tensors: rewrite.Tensors, template: int, layout: str) -> MtpParts:
    """Weights of a size at which every part of the layer shows in its drafts."""
    hidden = len(tensors["model.norm.weight"])
    prefix = f"model.layers.{template}."
    block = {
        name.removeprefix(prefix): random_like(rng, value) for name, value in tensors.items() if name.startswith(prefix)
    }
    is_own = layout == "numbered-own"
    table = widen(tensors["model.embed_tokens.weight"])
    return MtpParts(
        embedding_norm=random_like(rng, np.zeros(hidden)),
        hidden_norm=random_like(rng, np.zeros(hidden)),
        projection=random_like(rng, np.zeros((hidden, 2 * hidden))),
        block=block,
        output_norm=None if layout.startswith("ernie") else random_like(rng, np.zeros(hidden)),
        embedding=random_like(rng, table) if is_own else None,
        head=random_like(rng, table) if is_own else None,
    )


def random_like(rng: np.random.Generator, value: np.ndarray) -> F32:
    """A norm's or bias' vector around 1, a matrix [out, in] that keeps a row's size."""
    noise = rng.standard_normal(value.shape, np.float32)
    return 1 + 0.2 * noise if value.ndim == 1 else noise * value.shape[-1] ** -0.5


def ernie_names(layers: list[MtpParts], root: str) -> rewrite.Tensors:
    found: rewrite.Tensors = {}
    for j, layer in enumerate(layers):
        found[f"{root}.mtp_emb_norm.{j}.weight"] = layer.embedding_norm
        found[f"{root}.mtp_hidden_norm.{j}.weight"] = layer.hidden_norm
        found[f"{root}.mtp_linear_proj.{j}.weight"] = layer.projection
        found |= {f"{root}.mtp_block.{j}.{name}": value for name, value in layer.block.items()}
    return found


def numbered_names(layers: list[MtpParts], first: int) -> rewrite.Tensors:
    found: rewrite.Tensors = {}
    for j, layer in enumerate(layers):
        prefix = f"model.layers.{first + j}"
        named = {
            "enorm": layer.embedding_norm,
            "hnorm": layer.hidden_norm,
            "eh_proj": layer.projection,
            "shared_head.norm": layer.output_norm,
            "embed_tokens": layer.embedding,
            "shared_head.head": layer.head,
        }
        found |= {f"{prefix}.{part}.weight": value for part, value in named.items() if value is not None}
        found |= {f"{prefix}.{name}": value for name, value in layer.block.items()}
    return found


def qwen_names(layers: list[MtpParts]) -> rewrite.Tensors:
    """One layer; norms outside of the decoder layer are stored less 1, as everywhere in such a model."""
    [layer] = layers
    assert layer.output_norm is not None
    found: rewrite.Tensors = {
        "mtp.pre_fc_norm_embedding.weight": layer.embedding_norm - 1,
        "mtp.pre_fc_norm_hidden.weight": layer.hidden_norm - 1,
        "mtp.norm.weight": layer.output_norm - 1,
        "mtp.fc.weight": layer.projection,
    }
    return found | {f"mtp.layers.0.{name}": value for name, value in layer.block.items()}


def layout_of(name: str) -> str:
    """The layout of a golden model's published relatives."""
    if name.startswith("ernie"):
        return "ernie-folder"
    return "qwen" if name in HYBRIDS else "numbered"


def write_blocks(path: pathlib.Path, name: str, layers: list[MtpParts]) -> pathlib.Path:
    """The MTP layers' decoder layers as the layers 0, 1, ... of a model, for NumpyDecoder."""
    is_moe = any("experts" in part for part in layers[0].block)
    config = {
        "num_hidden_layers": len(layers),
        "layer_types": ["full_attention"] * len(layers) if name in HYBRIDS else None,
        "moe_layer_start_index": 0 if is_moe else len(layers),
        "first_k_dense_replace": 0 if is_moe else len(layers),
    }
    rewrite.write_folder(path, name, config)
    tensors = {n: v for n, v in rewrite.read(name).items() if ".layers." not in n}
    for j, layer in enumerate(layers):
        tensors |= {f"model.layers.{j}.{part}": value for part, value in layer.block.items()}
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    return path


class MtpReference:
    """What the drafts must be, teacher-forced.

    Attributes:
        path: the model's directory.
        hidden_rows, refeed: see MtpWeights.
    """

    hidden_rows, refeed = "post_norm", "post_norm"

    def __init__(
        self, path: pathlib.Path, blocks: pathlib.Path, layers: list[MtpParts], config: dict[str, object]
    ) -> None:
        self.path, self._layers = path, layers
        self._target = NumpyDecoder(path, "float32", "float32")
        self._blocks = NumpyDecoder(blocks, "float32", "float32")
        self._eps = float(str(config["rms_norm_eps"]))
        weights = self._target.weights
        self._embedding, self._head = widen(weights.embedding().data), widen(weights.lm_head().to_array())
        self._final_norm = widen(weights.final_norm())
        self.stored_head = functools.cache(self._store_head)
        self._drafts: dict[tuple[bytes, int, LinearFormat], Draft] = {}

    def _store_head(self, j: int, head_format: LinearFormat) -> F32:
        """Layer j's head f32[V, H] as a format keeps it."""
        own = self._layers[j].head
        return stored_weight(self._head if own is None else own, head_format)

    def hidden(self, token_ids: I32) -> F32:
        """Return the target's rows f32[T, H], after its final norm unless read otherwise."""
        return (self._target.stream if self.hidden_rows == "pre_norm" else self._target.hidden)(token_ids)

    def read_as(self, hidden_rows: str, refeed: str) -> None:
        """Have the model's config.json, and this, say another reading of the layers."""
        self.hidden_rows, self.refeed = hidden_rows, refeed
        config = json.loads((self.path / "config.json").read_text())
        (self.path / "config.json").write_text(json.dumps(config | {HIDDEN_KEY: hidden_rows, REFEED_KEY: refeed}))

    def drafts(self, text: I32, count: int, hidden: F32, head_format: LinearFormat = "float32") -> Draft:
        """Return the first `count` drafts after a text of at least two tokens; computed once per text.

        Args:
            hidden: the target's rows of all its tokens but the last.
            head_format: what the layers' head is stored as.
        """
        key = text.tobytes(), count, head_format
        if key not in self._drafts:
            found, margins = [], []
            for logits in self._logits(text, count, hidden, head_format):
                found.append(int(logits.argmax()))
                margins.append(float(logits.max() - np.partition(logits, -2)[-2]))
            self._drafts[key] = Draft(np.array(found, np.int32), np.array(margins, np.float32))
        return self._drafts[key]

    def logprobs(self, text: I32, count: int, hidden: F32) -> list[F32]:
        """Return f32[V] log-probabilities at the position of every draft; arguments as `drafts`."""
        return [x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in self._logits(text, count, hidden, "float32")]

    def _logits(self, text: I32, count: int, hidden: F32, head_format: LinearFormat) -> Iterator[F32]:
        # Rows of layer j start at slot j + 1; hidden[i] belongs to position start - 1 + i.
        single = len(self._layers) == 1
        for step in range(count):
            j = 0 if single else step
            start = 1 if single else j + 1
            normed, chained = self._run(j, text[start:], hidden[-(len(text) - start) :])
            logits = read_input(normed[-1:], head_format)[0] @ self.stored_head(j, head_format).T
            yield logits
            # One layer goes on with its own last output; the next of several reads all the rows of this one.
            hidden = np.concatenate([hidden, chained[-1:]]) if single else chained
            text = np.append(text, logits.argmax())

    def _run(self, j: int, token_ids: I32, hidden: F32) -> tuple[F32, F32]:
        """Layer j over all its rows: what its head reads, and what the next step reads."""
        layer = self._layers[j]
        table = self._embedding if layer.embedding is None else layer.embedding
        parts = [
            normalize(table[token_ids], layer.embedding_norm, self._eps),
            normalize(hidden, layer.hidden_norm, self._eps),
        ]
        output = self._blocks.layer(np.concatenate(parts, axis=1) @ layer.projection.T, j)
        norm = self._final_norm if layer.output_norm is None else layer.output_norm
        normed = normalize(output, norm, self._eps)
        return normed, {"post_norm": normed, "pre_norm": output, "target": hidden}[self.refeed]
