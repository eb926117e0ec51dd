"""Turns a checkpoint's weights into the layers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.device import constant, device
from fastdeploy_sd.device.expert_types import ExpertLayer, ExpertSlot
from fastdeploy_sd.models.adapted_linears import adapted_linears
from fastdeploy_sd.models.adapters import Adapters
from fastdeploy_sd.models.attention_config import AttentionConfig, GatedDeltaConfig, LatentAttentionConfig
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, MoeConfig
from fastdeploy_sd.models.layers.attention import Attention
from fastdeploy_sd.models.layers.decoder_layer import DecoderLayer, InputNorm, RmsNorm, TokenMixer
from fastdeploy_sd.models.layers.delta_net import GatedDeltaNet
from fastdeploy_sd.models.layers.latent_attention import LatentAttention
from fastdeploy_sd.models.layers.linear import (
    AdaptedLayer,
    ExpertGroup,
    ExpertMemory,
    GatheredLinear,
    Linear,
    LinearAdapters,
    LinearLayer,
    SummedLinear,
    TpGroup,
)
from fastdeploy_sd.models.layers.mlp import (
    Experts,
    FeedForward,
    GatedExpert,
    GatedMlp,
    MoeMlp,
    Router,
    ServedExperts,
    SpreadMoeMlp,
)
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import PANEL, DecoderShard, SumPart
from fastdeploy_sd.models.weights.delta_weights import DeltaNetWeights
from fastdeploy_sd.models.weights.latent_weights import LATENT_EPS, LatentWeights
from fastdeploy_sd.models.weights.layer_weights import SHARED_EXPERTS, LayerWeights, expert_parts
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.delta_memory import DeltaWeights
from fastdeploy_sd.ops.kv_cache import QkNorm
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import PackedExperts
from fastdeploy_sd.ops.weight_matrix import WeightMatrix

WeightAndBias = tuple[WeightMatrix, Weights | None]


class LayerBuilder:
    """Builds what a rank has of a decoder's layers, and of what surrounds them."""

    def __init__(
        self,
        config: DecoderConfig,
        scheme: QuantScheme,
        packer: WeightPacker,
        group: TpGroup,
        adapters: Adapters | None = None,
    ) -> None:
        self._config, self._scheme, self._packer, self._group = config, scheme, packer, group
        self._adapters = adapters
        self._shard = DecoderShard(config, group.shard, group.spread)

    def layer(
        self, weights: LayerWeights, i: int, input_scale: float = 1.0, input_norm: InputNorm | None = None
    ) -> DecoderLayer:
        """Build layer i, whose input is multiplied by input_scale; raises CheckpointError as the weights do.

        `input_norm`: in place of the usual one.
        """
        eps, outputs = self._config.norm_eps, weights.output_norms(i)
        return DecoderLayer(
            RmsNorm(weights.input_norm(i), eps, input_scale) if input_norm is None else input_norm,
            self._attention(weights, i),
            RmsNorm(weights.feed_forward_norm(i), eps, self._config.residual_scale),
            self._feed_forward(weights, i),
            None if outputs is None else (RmsNorm(outputs[0], eps), RmsNorm(outputs[1], eps)),
        )

    def head(self, matrix: WeightMatrix, fmt: LinearFormat, bias: Weights | None = None) -> LinearLayer:
        """Build an output head [V, H], whose tokens are shared out."""
        return self._gathered((matrix, bias), fmt, self._shard.vocabulary())

    def projection(self, weight_and_bias: WeightAndBias) -> LinearLayer:
        """Build a linear layer [H, K] over what every rank has, in the format of the dense layers."""
        return self._gathered(weight_and_bias, self._scheme.linear, self._shard.hidden())

    def _attention(self, weights: LayerWeights, i: int) -> TokenMixer:
        config, eps = self._config.layers[i].attention, self._config.norm_eps
        own = self._shard.attention(config)
        output = self._summed(weights.output(i), own, self._adapters_of(i, "output"))
        if isinstance(config, GatedDeltaConfig):
            return self._delta_net(weights.delta_net(i), config, output, i)
        if isinstance(config, LatentAttentionConfig):
            return self._latent_attention(weights.latent(i), config, output, i)
        norms, gate = weights.qk_norms(i), weights.output_gate(i)
        qk_norm = None if norms is None else QkNorm(constant(norms[0]), constant(norms[1]), eps)
        qkv = self._outputs(weights.qkv(i), self._shard.qkv(config), self._adapters_of(i, "qkv"))
        own_gate = None
        if gate is not None:
            own_gate = self._outputs((gate, None), [own.inputs], self._adapters_of(i, "gate"))
        return Attention(qkv, output, config, qk_norm, self._sinks(weights.sinks(i), config), own_gate)

    def _latent_attention(
        self, weights: LatentWeights, config: LatentAttentionConfig, output: AdaptedLayer, i: int
    ) -> LatentAttention:
        heads = self._shard.heads(config)

        def whole(role: str, matrix: WeightMatrix) -> Linear:
            return Linear(self._packer.linear(matrix, self._scheme.linear), None, self._adapters_of(i, role))

        def of_heads(matrices: Sequence[WeightMatrix]) -> PackedExperts[Tensor]:
            return self._packer.experts(matrices[heads.start : heads.stop], self._scheme.dtype)

        query = weights.query_latent
        queries = range(heads.start * config.query_dim, heads.stop * config.query_dim)
        return LatentAttention(
            None if query is None else (whole("query_latent", query[0]), RmsNorm(query[1], LATENT_EPS)),
            whole("queries", weights.queries.rows([queries])),
            whole("latent", weights.latent.rows([range(config.latent_dim)])),
            RmsNorm(weights.latent_norm, LATENT_EPS),
            whole("rotary_key", weights.latent.rows([range(config.latent_dim, config.head_dim)])),
            of_heads(weights.keys),
            of_heads(weights.values),
            output,
            config,
        )

    def _delta_net(self, net: DeltaNetWeights, config: GatedDeltaConfig, output: AdaptedLayer, i: int) -> GatedDeltaNet:
        qkvz, heads = self._shard.qkvz(config), self._shard.heads(config)
        of_heads, first_a = slice(heads.start, heads.stop), config.num_value_heads
        channels = np.concatenate([net.conv[part.start : part.stop] for part in qkvz[:3]])
        weights = DeltaWeights(
            conv=constant(np.ascontiguousarray(channels.T)),
            a_log=constant(net.a_log[of_heads]),
            dt_bias=constant(net.dt_bias[of_heads]),
            norm=constant(net.norm),
            eps=self._config.norm_eps,
        )
        # How strongly a state is written and decays is not quantised: an error would stay in it.
        rows = [heads, range(first_a + heads.start, first_a + heads.stop)]
        numbers = self._packer.linear(net.beta_and_decay.rows(rows), self._scheme.dtype)
        beta_and_decay = Linear(numbers, None, self._adapters_of(i, "beta_and_decay"))
        own = self._outputs((net.qkvz, None), qkvz, self._adapters_of(i, "qkvz"))
        return GatedDeltaNet(own, beta_and_decay, weights, output)

    def _sinks(self, sinks: Weights | None, config: AttentionConfig) -> Tensor | None:
        """Return those of the rank's heads."""
        heads = self._shard.heads(config)
        return None if sinks is None else constant(sinks[heads.start : heads.stop])

    def _feed_forward(self, weights: LayerWeights, i: int) -> FeedForward:
        moe = self._config.layers[i].mlp
        if isinstance(moe, DenseConfig):
            size = moe.intermediate_size
            return self._dense(weights, i, "mlp", size, self._shard.feed_forward(size))
        shared: FeedForward | None = None
        if moe.shared_intermediate_size > 0:
            size = moe.shared_intermediate_size
            shared = self._dense(weights, i, SHARED_EXPERTS, size, self._shard.shared_experts(moe))
            if (gate := weights.shared_gate(i)) is not None:
                packed, adapters = self._packer.linear(gate, self._scheme.dtype), self._adapters_of(i, "shared_gate")
                shared = GatedExpert(shared, Linear(packed, None, adapters))
        weight, bias = weights.router(i, moe)
        biases = weights.moe_biases(i, moe)
        logit_bias = None if biases is None else constant(biases[0])
        router = Router(constant(weight), logit_bias, None if bias is None else constant(bias), moe)
        own = self._experts(weights, i, moe)
        if self._group.experts is None:
            return MoeMlp(router, own, shared, self._group)
        return SpreadMoeMlp(router, self._served(self._group.experts, own, weights, i, moe), shared, self._group)

    def _dense(self, weights: LayerWeights, i: int, part: str, size: int, own: SumPart) -> GatedMlp:
        gate, up = own.inputs, range(size + own.inputs.start, size + own.inputs.stop)
        mlp, role = self._config.layers[i].mlp, "shared_" if part == SHARED_EXPERTS else ""
        return GatedMlp(
            self._outputs(weights.gate_up(i, part, size), (gate, up), self._adapters_of(i, f"{role}gate_up")),
            mlp.activation if isinstance(mlp, DenseConfig) else "silu",
            self._summed(weights.down(i, part, size), own, self._adapters_of(i, f"{role}down")),
        )

    def _experts(self, weights: LayerWeights, i: int, moe: MoeConfig) -> Experts:
        own, group = self._shard.experts(moe), self._group.experts
        ids: Sequence[int] = own.inputs
        may_move = group is not None and group.num_redundant is not None
        if group is not None and may_move:
            slots = group.experts_of(group.first_layer + self._config.expert_layers.index(i), moe.num_experts)
            # Memory of every slot; what is in empty ones is not published.
            ids = [expert if expert >= 0 else max(slots) for expert in slots]
        parts = expert_parts(moe)
        gate_up, down = (
            self._packer.experts(
                [read(i, parts[expert], moe.intermediate_size)[0] for expert in ids],
                self._scheme.experts,
                are_spread=group is not None,
                may_move=may_move,
            )
            for read in (weights.gate_up, weights.down)
        )
        biases = weights.moe_biases(i, moe)
        of_experts = [] if biases is None else [constant(np.ascontiguousarray(b[list(ids)])) for b in biases[1:]]
        return Experts(ids, gate_up, down, own.slices.count, *of_experts)

    def _served(self, group: ExpertGroup, own: Experts, weights: LayerWeights, i: int, moe: MoeConfig) -> ServedExperts:
        """Register the rank's experts of layer i at its service."""
        layers = self._config.expert_layers
        number = group.first_layer + layers.index(i)
        layer = ExpertLayer(
            moe.num_experts, self._config.hidden_size, moe.intermediate_size, moe.top_k, storage(self._scheme.dtype),
            format_code(own.gate_up.format), format_code(own.down.format), moe.gate_limit, moe.num_groups,
        )  # fmt: skip
        places: Sequence[ExpertSlot] = own.slots()
        slots: Sequence[ExpertSlot | None] = places
        if group.num_redundant is not None:
            found = group.experts_of(number, moe.num_experts)
            slots = [place if expert >= 0 else None for place, expert in zip(places, found, strict=True)]
            group.moves[number] = ExpertMemory(places, self._packs(own, weights, i, moe))
        group.service.register_layer(number, layer, slots)
        group.service.kept.append(own)  # a recorded pass keeps no layers
        return ServedExperts(group.service, number, i == layers[0], i == layers[-1], own.num_slices)

    def _packs(
        self, own: Experts, weights: LayerWeights, i: int, moe: MoeConfig
    ) -> Callable[[int, ExpertSlot], ExpertSlot]:
        """Return what writes an expert of layer i over another."""
        parts, size, fmt = expert_parts(moe), moe.intermediate_size, self._scheme.experts
        device().prepare_overwrites(max(own.gate_up.expert_bytes, own.down.expert_bytes))

        def pack(expert: int, place: ExpertSlot) -> ExpertSlot:
            self._packer.pack_expert(weights.gate_up(i, parts[expert], size)[0], fmt, own.gate_up, place.gate_up)
            self._packer.pack_expert(weights.down(i, parts[expert], size)[0], fmt, own.down, place.down)
            if (biases := weights.moe_biases(i, moe)) is not None:
                for bias, address in zip(biases[1:], (place.gate_up_bias, place.down_bias), strict=True):
                    row = np.ascontiguousarray(bias[expert], np.float32).view(np.uint8)
                    device().overwrite(address, row.nbytes, partial(np.copyto, src=row))
            return replace(place, expert=expert)

        return pack

    def _adapters_of(self, i: int, role: str) -> LinearAdapters | None:
        """Allocate the adapters of one of layer i's linear layers; None = it has none."""
        linear = None if self._adapters is None else adapted_linears(self._config, self._shard, i).get(role)
        if self._adapters is None or linear is None:
            return None
        is_shared = len(linear.inputs) < linear.in_features
        communicator = self._group.communicator if is_shared else None
        return LinearAdapters(self._adapters.add(linear), linear.slices, communicator)

    def _outputs(
        self, weight_and_bias: WeightAndBias, rows: Sequence[range], adapters: LinearAdapters | None = None
    ) -> Linear:
        """Build the rank's outputs of a linear layer, which stay with it."""
        matrix, bias = weight_and_bias
        return Linear(self._packer.linear(matrix.rows(rows), self._scheme.linear), _of_rows(bias, rows), adapters)

    def _summed(
        self, weight_and_bias: WeightAndBias, own: SumPart, adapters: LinearAdapters | None = None
    ) -> Linear | SummedLinear:
        """Build the rank's part of a linear layer whose inputs are shared out."""
        matrix, bias = weight_and_bias
        packed = self._packer.linear(matrix.columns(own.inputs), self._scheme.linear, own.slices)
        if self._group.is_alone:
            return Linear(packed, bias, adapters)
        return SummedLinear(packed, bias, self._group, adapters)

    def _gathered(self, weight_and_bias: WeightAndBias, fmt: LinearFormat, own: range) -> LinearLayer:
        """Build the rank's part of a linear layer whose outputs every rank needs."""
        matrix, bias = weight_and_bias
        packed, own_bias = self._packer.linear(matrix.rows([own]), fmt), _of_rows(bias, [own])
        if self._group.is_alone:
            return Linear(packed, own_bias)
        return GatheredLinear(packed, own_bias, self._group, matrix.shape[0], PANEL)


def _of_rows(bias: Weights | None, rows: Sequence[range]) -> Weights | None:
    return None if bias is None else np.concatenate([bias[part.start : part.stop] for part in rows])
