"""The identity of KV: two instances may exchange KV, or continue outputs, only if it is equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import fastdeploy_sd
from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.rope_table import RopeScaling
from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.types import KvDescription
from fastdeploy_sd.worker.kv.kv_sizing import max_model_len
from fastdeploy_sd.worker.loading.draft_weights import own_scheme
from fastdeploy_sd.worker.loading.weights_digest import weights_digest


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What decides the KV of an instance.

    Attributes:
        device: that computes it: "CPU, " and its instruction-set level, or "CUDA, " and the GPU's name.
        fingerprint: equal for equal weights, formats, kernels (of a CPU those of one instruction-set level) and
            version, so that KV and logits have equal bits.
        draft_fingerprint: of the draft layers, likewise; "" = none.
        kv_format: "float32", "bfloat16", "float16", "int8" or "fp8".
        num_layers: of the target. num_kv_heads, head_dim: of its first layer with KV, in all ranks together.
    """

    device: str
    fingerprint: str
    draft_fingerprint: str
    kv_format: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def of(
        config: Config,
        target: DecoderConfig,
        kv_format: str,
        checkpoint: ModelSource,
        drafts: Sequence[ModelSource],
        kernels: str | None = None,
    ) -> KvIdentity:
        """Return the identity of a model as configured; see `weights_digest` on when the weights are read.

        Args:
            kv_format: see the class.
            drafts: the sources of the draft models.
            kernels: that compute it; None = those of the kernel library, at its level.
        """
        numerics = {
            "version": fastdeploy_sd.__version__,
            "isa": library.isa() if kernels is None else kernels,
            "dtype": config.model.dtype,
            "quantization": repr(config.model.quantization),
            "kv_format": kv_format,
            "rotary": repr(_scalings(target, max_model_len(config, target))),
        }
        fingerprint = _digest({**numerics, "weights": _content(config, checkpoint)})
        drafting = ""
        if drafts:
            # Only what writes KV: the head that drafts are read from does not.
            scheme = own_scheme(config)
            formats = {"linear": scheme.linear, "experts": scheme.experts}
            content = [part for draft in drafts for part in _content(config, draft)]
            drafting = _digest({"target": fingerprint, **formats, "weights": content})
        return KvIdentity(
            kernels or f"CPU, {library.isa()}",
            fingerprint,
            drafting,
            kv_format,
            config.cache.block_size,
            target.num_layers,
            target.attentions[0].num_kv_heads,
            target.attentions[0].head_dim,
        )

    def describe(self, page_bytes: tuple[int, ...], windows: tuple[int, ...]) -> KvDescription:
        """Return what instances must agree on before KV goes from one to another."""
        return KvDescription(
            self.device,
            self.fingerprint,
            self.block_size,
            self.kv_format,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            page_bytes,
            self.draft_fingerprint,
            windows[: self.num_layers],
        )

    def output_fingerprint(self, rule: VerifyRule) -> str:
        """Return a fingerprint, equal for instances that give a request equal tokens; it covers a lossy rule."""
        return _digest({"kv": self.fingerprint, "rule": asdict(rule)}) if rule.is_lossy else self.fingerprint


def _content(config: Config, checkpoint: ModelSource) -> list[str]:
    return [checkpoint.config_digest(), weights_digest(config, checkpoint)]


def _scalings(target: DecoderConfig, max_length: int) -> list[RopeScaling | None]:
    """Return how each kind of layer scales its rotary embedding, which may follow from the longest sequence."""
    return [None if rope is None else rope.scaling_of_length(max_length) for rope in target.ropes]


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
