"""A decoder in NumPy, from the ops' reference meanings alone: what a quantised model must compute.

float32 activations, one sequence, the whole of it at once. Shares the checkpoint reader and nothing else with layers/.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.models.attention_config import AttentionConfig, GatedDeltaConfig, LatentAttentionConfig
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DenseConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import attention_slices, feed_forward_slices
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.kv_cache import Rotary
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.reference.attention import rotate
from fastdeploy_sd.ops.reference.linear import linear
from fastdeploy_sd.ops.reference.moe import moe_ffn
from fastdeploy_sd.ops.reference.rowwise import geglu, rms_norm, softcap, swiglu
from fastdeploy_sd.ops.rope_table import rope_table
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import F32, I32
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.models import golden


def f32(array: npt.NDArray[Any]) -> F32:
    """The array, which is f32 where its maker only says that it is one of several types."""
    assert array.dtype == np.float32
    return array


def sigmoid(x: F32) -> F32:
    return f32(1 / (1 + np.exp(-x)))


def normalize(x: F32, weight: npt.NDArray[Any], eps: float) -> F32:
    """RMSNorm of every row."""
    return f32(rms_norm(x, f32(weight), eps)[0])


class NumpyDecoder:
    """One golden model (its name, or a directory) with its linear layers in `fmt` and its head in `head_format`.

    Args:
        expert_format: of the experts that a router chooses; None = fmt.
    """

    def __init__(
        self,
        model: str | pathlib.Path,
        fmt: LinearFormat,
        head_format: LinearFormat,
        expert_format: LinearFormat | None = None,
    ) -> None:
        checkpoint = Checkpoint(golden.ROOT / model)
        self._config = read_decoder_config(checkpoint.config)
        self.weights = DecoderWeights(checkpoint, self._config)
        self.norm_eps = self._config.norm_eps
        self._format, self._head_format = fmt, head_format
        self._expert_format = fmt if expert_format is None else expert_format

    def logits(self, token_ids: I32) -> F32:
        """Return f32[T, V]."""
        c, hidden = self._config, self.hidden(token_ids)
        logits = f32(linear(hidden, self.weights.lm_head().to_array(), self._head_format)) * np.float32(c.logits_scale)
        return logits if c.logits_cap is None else softcap(logits, c.logits_cap)

    def hidden(self, token_ids: I32) -> F32:
        """Return f32[T, H], the rows after the final norm."""
        return normalize(self.stream(token_ids), self.weights.final_norm(), self._config.norm_eps)

    def stream(self, token_ids: I32) -> F32:
        """Return f32[T, H], the rows before the final norm."""
        x = widen(self.weights.embedding().data)[token_ids] * np.float32(self._config.embedding_scale)
        for i in range(self._config.num_layers):
            x = self.layer(x, i)
        return x

    def layer(self, x: F32, i: int) -> F32:
        """Return layer i's output f32[T, H] over the residual stream x, whose rows stand at positions 0, 1, ..."""
        c, w = self._config, self.weights
        norms, scale = w.output_norms(i), np.float32(c.residual_scale)
        mix = self._delta_net if isinstance(c.layers[i].attention, GatedDeltaConfig) else self._attention
        y = mix(normalize(x, w.input_norm(i), c.norm_eps), i)
        x = x + scale * (y if norms is None else normalize(y, norms[0], c.norm_eps))
        y = self._feed_forward(normalize(x, w.feed_forward_norm(i), c.norm_eps), i)
        return x + scale * (y if norms is None else normalize(y, norms[1], c.norm_eps))

    def _linear(self, x: F32, weight_and_bias: tuple[WeightMatrix, Any], slices: SliceRule = WHOLE) -> F32:
        weight, bias = weight_and_bias
        return f32(linear(x, weight.to_array(), self._format, bias, slices=slices))

    def _attention(self, x: F32, i: int) -> F32:
        c, w, a, n = self._config, self.weights, self._config.layers[i].attention, len(x)
        if isinstance(a, LatentAttentionConfig):
            return self._latent_attention(x, i, a)
        assert isinstance(a, AttentionConfig)
        heads = self._linear(x, self.weights.qkv(i)).reshape(n, -1, a.head_dim)
        q, k, v = np.split(heads, [a.num_heads, a.num_heads + a.num_kv_heads], axis=1)
        norms = self.weights.qk_norms(i)
        if norms is not None:
            q, k = (
                normalize(np.ascontiguousarray(h).reshape(-1, a.head_dim), weight, c.norm_eps).reshape(h.shape)
                for h, weight in zip((q, k), norms, strict=True)
            )
        positions = np.arange(n, dtype=np.int32)
        if a.rope is not None:
            table = rope_table(n, a.rope.rotary_dim, a.rope.theta, a.rope.scaling_of_length(c.max_position))
            rotary = Rotary(table, a.rope.interleaved)
            q, k = rotate(q, positions, rotary), rotate(k, positions, rotary)
            if a.rope.query_scaling is not None:
                q = q * a.rope.query_scaling.factors(n)[:, None, None]
        group = a.num_heads // a.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * (a.head_dim**-0.5 if a.scale is None else a.scale)
        if a.softcap is not None:
            scores = a.softcap * np.tanh(scores / a.softcap)
        distance = positions[:, None] - positions
        scores = np.where((distance >= 0) & (distance < (a.window or n)), scores, -np.inf)
        sinks = w.sinks(i)
        if sinks is not None:
            scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (a.num_heads, n, 1))], axis=-1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", (p / p.sum(-1, keepdims=True))[..., :n], v)
        rows = y.reshape(n, -1).astype(np.float32)
        gate = w.output_gate(i)
        if gate is not None:
            rows = rows * sigmoid(self._linear(x, (gate, None)))
        return self._linear(rows, self.weights.output(i), attention_slices(a))

    def _latent_attention(self, x: F32, i: int, a: LatentAttentionConfig) -> F32:
        """As published: each head's keys and values are made of the latent vectors."""
        w, n = self.weights.latent(i), len(x)
        read = x
        if w.query_latent is not None:
            read = normalize(self._linear(x, (w.query_latent[0], None)), w.query_latent[1], 1e-6)
        q = self._linear(read, (w.queries, None)).reshape(n, a.num_heads, -1)
        latent = self._linear(x, (w.latent.rows([range(a.latent_dim)]), None))
        rotary_key = self._linear(x, (w.latent.rows([range(a.latent_dim, a.head_dim)]), None))
        latent = normalize(latent, w.latent_norm, 1e-6).astype(np.float64)
        table = rope_table(n, a.rope.rotary_dim, a.rope.theta, a.rope.scaling_of_length(self._config.max_position))
        positions, rotary = np.arange(n, dtype=np.int32), Rotary(table, a.rope.interleaved)
        q_rope = rotate(q[:, :, a.key_dim :], positions, rotary)
        k_rope = rotate(rotary_key[:, None], positions, rotary)[:, 0]
        y = np.zeros((n, a.num_heads, a.value_dim))
        for h, (of_keys, of_values) in enumerate(zip(w.keys, w.values, strict=True)):
            k, v = latent @ widen(of_keys.to_array()), latent @ widen(of_values.to_array()).T
            scores = a.scale * (
                q[:, h, : a.key_dim].astype(np.float64) @ k.T + q_rope[:, h].astype(np.float64) @ k_rope.T
            )
            scores = np.where(positions[:, None] >= positions, scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, h] = p / p.sum(-1, keepdims=True) @ v
        return self._linear(y.reshape(n, -1).astype(np.float32), self.weights.output(i), attention_slices(a))

    def _delta_net(self, x: F32, i: int) -> F32:
        """The recurrence in float64, token by token; q, k, v and z of a value head h are those of key head h // r."""
        c, w, net, n = self._config, self.weights.delta_net(i), self._config.layers[i].attention, len(x)
        assert isinstance(net, GatedDeltaConfig)
        qkvz = self._linear(x, (w.qkvz, None)).astype(np.float64)
        channels = 2 * net.key_size + net.value_size
        beta, decay = np.split(f32(linear(x, w.beta_and_decay.to_array(), "float32")).astype(np.float64), 2, axis=1)
        beta, a = 1 / (1 + np.exp(-beta)), decay + w.dt_bias.astype(np.float64)
        decay = np.exp(-np.exp(w.a_log.astype(np.float64)) * np.log1p(np.exp(a)))
        padded = np.concatenate([np.zeros((net.conv_width - 1, channels)), qkvz[:, :channels]])
        mixed = sum(padded[j : j + n] * w.conv[:, j] for j in range(net.conv_width))
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [net.key_size, 2 * net.key_size], axis=1)
        ratio = net.num_value_heads // net.num_key_heads
        q, k = (np.repeat(part.reshape(n, net.num_key_heads, -1), ratio, axis=1) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        v, z = (part.reshape(n, net.num_value_heads, -1) for part in (v, qkvz[:, channels:]))
        state, out = np.zeros((net.num_value_heads, net.key_dim, net.value_dim)), np.zeros_like(v)
        for t in range(n):
            state *= decay[t][:, None, None]
            update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state += k[t][:, :, None] * update[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t]) * net.key_dim**-0.5
        out /= np.sqrt((out**2).mean(-1, keepdims=True) + c.norm_eps)
        rows = (out * f32(w.norm) * z / (1 + np.exp(-z))).reshape(n, -1).astype(np.float32)
        return self._linear(rows, self.weights.output(i), attention_slices(net))

    def _feed_forward(self, x: F32, i: int) -> F32:
        moe, w = self._config.layers[i].mlp, self.weights
        if isinstance(moe, DenseConfig):
            return self._dense(x, i, "mlp", moe.intermediate_size)
        router, selection_bias = w.router(i, moe)
        parts = [f"mlp.experts.{e}" for e in range(moe.num_experts)]
        gate_up = np.stack([w.gate_up(i, part, moe.intermediate_size)[0].to_array() for part in parts])
        down = np.stack([w.down(i, part, moe.intermediate_size)[0].to_array() for part in parts])
        shared = None
        if moe.shared_intermediate_size > 0:
            shared = self._dense(x, i, "mlp.shared_experts", moe.shared_intermediate_size)
            gate = w.shared_gate(i)
            if gate is not None:
                shared = shared * sigmoid(f32(linear(x, gate.to_array(), "float32")))
        biases = [None if b is None else f32(b) for b in w.moe_biases(i, moe) or (None, None, None)]
        bias = None if selection_bias is None else f32(selection_bias)
        y = moe_ffn(
            x, f32(router), gate_up, down, self._expert_format, top_k=moe.top_k, normalize=moe.normalize,
            norm_min=moe.norm_min, selection_bias=bias, shared=shared, scale=moe.scale, sigmoid=moe.sigmoid,
            router_bias=biases[0], gate_up_bias=biases[1], down_bias=biases[2], gate_limit=moe.gate_limit,
            num_groups=moe.num_groups, num_chosen_groups=moe.num_chosen_groups,
        )  # fmt: skip
        return f32(y)

    def _dense(self, x: F32, i: int, part: str, size: int) -> F32:
        mlp = self._config.layers[i].mlp
        gate = geglu if isinstance(mlp, DenseConfig) and mlp.activation == "gelu_tanh" else swiglu
        hidden = f32(gate(self._linear(x, self.weights.gate_up(i, part, size))))
        return self._linear(hidden, self.weights.down(i, part, size), feed_forward_slices(size))
