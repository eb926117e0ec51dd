"""Random draft heads for golden models, and what each of them must draft: NumPy, in float64, from these weights."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.models.checkpoint import SafetensorsFile
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.types import F32, I32
from tests.models import golden, rewrite
from tests.models.numpy_decoder import NumpyDecoder, normalize

F64 = npt.NDArray[np.float64]
# The target's row, the newest token, the number of drafts -> logits of every draft.
Logits = Callable[[F64, int, int], list[F64]]


@dataclass(frozen=True)
class HeadReference:
    """Heads in a folder, and what they must draft after rows of their target."""

    path: pathlib.Path
    logits: Logits
    has_prefix_layer: bool = False

    def drafts(self, row: F32, token: int, count: int) -> tuple[list[int], float]:
        """Return the drafts after a row of the target and the token that it gave, and the least lead of a logit."""
        found = self.logits(row.astype(np.float64), token, count)
        lead = min(float(logits.max() - np.partition(logits, -2)[-2]) for logits in found)
        return [int(logits.argmax()) for logits in found], lead

    def rows(self, target: NumpyDecoder, token_ids: I32) -> F32:
        """Return the rows f32[T, H] that the heads read after each token."""
        hidden = target.hidden(token_ids)
        if not self.has_prefix_layer:
            return hidden
        # Its weights are those of the target's first layer and final norm.
        return normalize(target.layer(hidden, 0), widen(target.weights.final_norm()), target.norm_eps)


class _Random:
    """Makes weights of a golden model's sizes."""

    def __init__(self, name: str, seed: int) -> None:
        self.tensors = rewrite.read(name)
        config = json.loads((golden.ROOT / name / "config.json").read_text())
        self.hidden_size, self.vocab_size = config["hidden_size"], config["vocab_size"]
        self.embedding = widen(self.tensors["model.embed_tokens.weight"]).astype(np.float64)
        self.rng = np.random.default_rng([seed, *name.encode()])

    def matrix(self, rows: int, columns: int) -> F32:
        return (self.rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def vector(self, size: int) -> F32:
        return (0.1 * self.rng.standard_normal(size)).astype(np.float32)


def make_medusa(folder: pathlib.Path, name: str, num_heads: int = 3, *, numbered: bool = True) -> HeadReference:
    """Two residual blocks per head; in the layout of Medusa's authors or vLLM's, there over every third token."""
    made, tensors = _Random(name, 1), dict[str, Any]()
    blocks = [
        [(made.matrix(made.hidden_size, made.hidden_size), made.vector(made.hidden_size)) for _ in range(2)]
        for _ in range(num_heads)
    ]
    heads = [made.matrix(made.vocab_size, made.hidden_size) for _ in range(num_heads)]
    token_map = np.arange(0, made.vocab_size, 1 if numbered else 3)
    if not numbered:
        tensors["medusa_heads.token_map"] = token_map
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(blocks[i]):
            block = f"{i}.{j}.linear" if numbered else f"medusa_heads.blocks.{i}.layers.{j}"
            tensors |= {f"{block}.weight": weight, f"{block}.bias": bias}
        # Without one, head 1 has the target's.
        if not numbered:
            tensors[f"medusa_heads.lm_heads.{i}.weight"] = head[token_map]
        elif i == 1:
            heads[i] = widen(made.tensors["lm_head.weight"])
        else:
            tensors[f"{i}.2.weight"] = head

    def logits(row: F64, token: int, count: int) -> list[F64]:
        found = []
        for i in range(count):
            x = row
            for weight, bias in blocks[i]:
                x = x + _silu(weight @ x + bias)
            found.append(np.full(made.vocab_size, -np.inf))
            found[-1][token_map] = (heads[i] @ x)[token_map]
        return found

    write(folder, "medusa_lm_head", {"medusa_num_heads": 2, "medusa_num_layers": 2}, tensors)
    return HeadReference(folder, logits)


def make_hydra(folder: pathlib.Path, name: str, num_heads: int = 3, *, has_prefix_layer: bool = False) -> HeadReference:
    """Grounded heads of two blocks, after a decoder layer or not."""
    made, tensors, parts = _Random(name, 2), dict[str, Any](), []
    size = made.hidden_size
    for i in range(num_heads):
        first, around, second, head = (
            (made.matrix(rows, columns), made.vector(rows))
            for rows, columns in ((size, (i + 2) * size), (size, (i + 2) * size), (size, size), (made.vocab_size, size))
        )
        parts.append((first, around, second, head))
        at, output = ((1, 3), f"{i}.1") if has_prefix_layer else ((0, 1), str(i))
        named = {f"hydra_mlp.{i}.{at[0]}.linear": first, f"hydra_mlp.{i}.{at[0]}.res_connection": around}
        named |= {f"hydra_mlp.{i}.{at[1]}.linear": second, f"hydra_lm_head.{output}": head}
        tensors |= {f"{key}.weight": weight for key, (weight, _) in named.items()}
        tensors |= {f"{key}.bias": bias for key, (_, bias) in named.items()}
    if has_prefix_layer:
        begin = "model.layers.0."
        layer = {key.removeprefix(begin): value for key, value in made.tensors.items() if key.startswith(begin)}
        tensors |= {f"prefix_embeding_layer.layers.0.{key}": value for key, value in layer.items()}
        tensors["prefix_embeding_layer.norm.weight"] = made.tensors["model.norm.weight"]

    def logits(row: F64, token: int, count: int) -> list[F64]:
        found, state = [], row
        for (first, first_bias), (around, around_bias), (second, second_bias), (head, head_bias) in parts[:count]:
            state = np.concatenate([state, made.embedding[token]])
            x = around @ state + around_bias + _silu(first @ state + first_bias)
            x = x + _silu(second @ x + second_bias)
            found.append(head @ x + head_bias)
            token = int(found[-1].argmax())
        return found

    arch = "prefix-mlp" if has_prefix_layer else "mlp"
    config = {"hydra_num_heads": num_heads, "hydra_num_layers": 2, "hydra_head_arch": arch, "grounded_heads": True}
    write(folder, "hydra_lm_head", config, tensors)
    return HeadReference(folder, logits, has_prefix_layer)


def make_mlp_speculator(folder: pathlib.Path, name: str, num_heads: int = 3, *, tied: bool = False) -> HeadReference:
    """Heads of another width than the target's rows."""
    made, tensors, width = _Random(name, 3), dict[str, Any](), 96
    sizes = {"emb": (made.vocab_size, width), "head": (made.vocab_size, width)}
    parts: list[dict[str, Any]] = []
    for i in range(num_heads):
        part: dict[str, Any] = {key: made.matrix(*size) for key, size in sizes.items()}
        part |= {"proj": made.matrix(width, width if i else made.hidden_size), "bias": made.vector(width)}
        part["weight"] = 1 + made.vector(width)
        if tied and i > 0:
            own = {"proj": part["proj"] if i == 1 else parts[1]["proj"]}
            part = parts[0] | own
        parts.append(part)
        named = {f"{key}.{i}.weight": part[key] for key in ("emb", "head", "proj")}
        named |= {f"ln.{i}.{key}": part[key] for key in ("weight", "bias")}
        tensors |= {f"speculator.{key}": value for key, value in named.items()}
    a = 0.5 ** (0.5 / num_heads)
    b = math.sqrt((1 - a * a) * width / 2)

    def logits(row: F64, token: int, count: int) -> list[F64]:
        found, state = [], row
        if tied:
            state = row / np.sqrt((row**2).mean() + 1e-6) / math.sqrt(2)
        for part in parts[:count]:
            z = part["proj"] @ state + b / a * part["emb"][token]
            z = z / np.sqrt((z**2).mean() + 1e-6) * part["weight"] + part["bias"]
            state = np.array([x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in z])
            found.append(part["head"] @ state)
            token = int(found[-1].argmax())
        return found

    config = {"model_type": "mlp_speculator", "emb_dim": made.hidden_size, "inner_dim": width, "n_predict": num_heads}
    config |= {"architectures": ["MLPSpeculatorPreTrainedModel"], "tie_weights": tied, "scale_input": tied}
    write(folder, "model", config, tensors)
    return HeadReference(folder, logits)


def _silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def change(folder: pathlib.Path, config: dict[str, Any], tensor: str) -> None:
    """Change keys of config.json, and renumber or cut a tensor."""
    [path] = folder.glob("*.safetensors")
    file = SafetensorsFile(path)
    tensors = {name: np.array(file.tensor(name)) for name in file.entries}
    if "linear" in tensor:
        tensors = {name.replace("2.", "3.", 1) if name.startswith("2.") else name: x for name, x in tensors.items()}
    elif tensor:
        tensors[tensor] = tensors[tensor][:3]
    rewrite.write_file(path, tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))


def write(folder: pathlib.Path, file: str, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write a folder of heads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rewrite.write_file(folder / f"{file}.safetensors", tensors, {"format": "pt"})
