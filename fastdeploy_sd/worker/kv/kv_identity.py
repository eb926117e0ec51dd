"""Whose KV this is: what two instances must have in common for KV, or an output, of one to be that of the other."""

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
from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.worker.loading.draft_formats import own_scheme
from fastdeploy_sd.worker.loading.weights_digest import weights_digest


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What the KV of an instance is.

    Attributes:
        device: what computes it: "CPU, " and its instruction-set level, or "CUDA, " and the GPU's name.
        fingerprint: the same for the same weights, formats, kernels (of a CPU those of one instruction-set level) and
            version, so that KV and logits have the same bits.
        draft_fingerprint: the same for the same draft layers besides; "" = there are none.
        kv_format: "float32", "bfloat16", "float16", "int8" or "fp8".
        block_size: tokens per block.
        num_layers: of the target. num_kv_heads, head_dim: of its first layer, in all ranks together.
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
        """Return that of a model as configured; see `weights_digest` on when the weights are read.

        Args:
            kv_format: see the class.
            drafts: where the draft models come from.
            kernels: which compute it; None = the kernel library's, at its level.
        """
        numerics = {
            "version": fastdeploy_sd.__version__,
            "isa": library.isa() if kernels is None else kernels,
            "dtype": config.model.dtype,
            "quantization": repr(config.model.quantization),
            "kv_format": kv_format,
        }
        fingerprint = _digest({**numerics, "weights": _content(config, checkpoint)})
        drafting = ""
        if drafts:
            # What KV is written by: which head drafts are read from makes no difference to it.
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
            target.layers[0].attention.num_kv_heads,
            target.layers[0].attention.head_dim,
        )

    def output_fingerprint(self, rule: VerifyRule) -> str:
        """Return what is the same for instances that give a request the same tokens; a lossy rule is a part of it."""
        return _digest({"kv": self.fingerprint, "rule": asdict(rule)}) if rule.is_lossy else self.fingerprint


def _content(config: Config, checkpoint: ModelSource) -> list[str]:
    return [checkpoint.config_digest(), weights_digest(config, checkpoint)]


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
