"""Draft heads: Medusa, Hydra and MLP speculators. Each makes one draft of a state that began as the target's row.

    Medusa            x = h;                    x = x + silu(block(x)) per block;        logits = head(x)
    Hydra             c = state | E(token);     x = res(c) + silu(linear(c)), blocks;    logits = head(x); state = c
    MLP speculator    z = proj(state) + s * E(token);  state = gelu(norm(z));            logits = head(state)

Sources: arXiv:2401.10774 (Medusa), 2402.05109 (Hydra, Hydra++), 2404.19124 (MLP speculator).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.drafters.draft_model import CombineHidden, DraftBlock, DraftInputs, DraftOutput, TargetParts
from fastdeploy_sd.models.drafters.draft_parts import DraftParts, Embed, Head
from fastdeploy_sd.models.drafters.heads.mlp_speculator_weights import MlpSpeculatorWeights
from fastdeploy_sd.models.drafters.heads.weights import HeadsWeights, HydraWeights, MedusaWeights
from fastdeploy_sd.models.layers.decoder_layer import DecoderLayer, RmsNorm
from fastdeploy_sd.models.layers.linear import ALONE, LinearLayer, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.rowwise import add_silu, bias_gelu, concat_columns, rms_norm

# State [n, S] and the embedded token after it [n, E], or whatever where none is read -> output rows and the next state.
Advance = Callable[[Tensor, Any], DraftOutput]
T = TypeVar("T")
_MLP_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    """One head; `embed`: of the token that it reads, None = it reads none."""

    advance: Advance
    logits: Head
    embed: Embed | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLayer:
    """Hydra++'s decoder layer over the target's rows, with KV of its own."""

    block: DecoderLayer
    norm: RmsNorm

    def __call__(self, rows: DraftInputs) -> Tensor:
        normed, _ = self.norm(*self.block(rows.hidden, None, rows.caches[0], rows.maps))
        return normed


class HeadChain:
    """A DraftModel of heads: head i makes draft i."""

    num_layers = 1
    combine_hidden: CombineHidden | None = None
    block: DraftBlock | None = None

    def __init__(
        self, heads: Sequence[DraftHead], prefix: PrefixLayer | None = None, token_map: Tensor | None = None
    ) -> None:
        self._heads, self._prefix, self.token_map = heads, prefix, token_map

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        """See DraftModel. Without a prefix layer every row drafts."""
        head, state = self._heads[step], rows.hidden
        token = None if head.embed is None else head.embed(rows.input_ids)
        if self._prefix is not None and step == 0:
            state = self._prefix(rows)
            if token is not None and rows.maps.outputs is not None:
                token = gather_output_rows(token, rows.maps.outputs.indices)
        return head.advance(state, token)

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        if self._prefix is not None:
            self._prefix.block.store_kv(rows.hidden, None, rows.caches[0], rows.maps)

    def logits(self, step: int, normed: Tensor) -> Tensor:
        return self._heads[step].logits(normed)


def build_medusa(
    target: TargetParts,
    weights: MedusaWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> HeadChain:
    """Build this rank's part of the heads of so many drafts."""
    builder = _Builder(target, weights, scheme, packer, group)
    heads = [DraftHead(_medusa(builder.linears(i)), builder.logits(i)) for i in range(num_steps)]
    return HeadChain(heads, token_map=None if weights.token_map is None else constant(weights.token_map))


def build_hydra(
    target: TargetParts,
    weights: HydraWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> HeadChain:
    """As build_medusa."""
    builder = _Builder(target, weights, scheme, packer, group)
    heads = [
        DraftHead(_hydra(*builder.linears(i)), builder.logits(i), builder.embed(i))
        if weights.is_grounded
        else DraftHead(_medusa(builder.linears(i)), builder.logits(i))
        for i in range(num_steps)
    ]
    if weights.prefix_layer is None:
        return HeadChain(heads)
    norm = RmsNorm(weights.prefix_norm(), weights.config.norm_eps)
    return HeadChain(heads, PrefixLayer(builder.parts.builder.layer(weights.prefix_layer, 0), norm))


def build_mlp_speculator(
    target: TargetParts,
    weights: MlpSpeculatorWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> HeadChain:
    """As build_medusa."""
    builder = _Builder(target, weights, scheme, packer, group)
    heads = [
        DraftHead(
            _mlp(builder.linears(i)[0], *weights.norm(i), weights.token_scale), builder.logits(i), builder.embed(i)
        )
        for i in range(num_steps)
    ]
    if weights.scales_input:
        heads[0] = replace(heads[0], advance=_of_scaled(heads[0].advance, target.decoder.config.hidden_size))
    return HeadChain(heads)


class _Builder:
    """Turns weights of heads into layers; what heads share is built once."""

    def __init__(
        self, target: TargetParts, weights: HeadsWeights, scheme: QuantScheme, packer: WeightPacker, group: TpGroup
    ) -> None:
        self._weights, self.parts = weights, DraftParts(target, weights.config, scheme, packer, group)
        self._built: dict[str, Any] = {}

    def linears(self, i: int) -> list[LinearLayer]:
        build = self.parts.builder.projection
        return [self._once(one.weight.name, functools.partial(build, one)) for one in self._weights.linears(i)]

    def logits(self, i: int) -> Head:
        own = self._weights.head(i)
        return self.parts.head(None) if own is None else self._once(own.weight.name, lambda: self.parts.head(*own))

    def embed(self, i: int) -> Embed:
        own = self._weights.embedding(i)
        return self.parts.embed(None) if own is None else self._once(own.name, lambda: self.parts.embed(own))

    def _once(self, name: str, build: Callable[[], T]) -> T:
        if name not in self._built:
            self._built[name] = build()
        return cast("T", self._built[name])


def _medusa(blocks: Sequence[LinearLayer]) -> Advance:
    return lambda state, token: DraftOutput(_through(blocks, state), state)


def _hydra(first: LinearLayer, around_first: LinearLayer, *rest: LinearLayer) -> Advance:
    def advance(state: Tensor, token: Tensor) -> DraftOutput:
        joined = concat_columns(state, token)
        return DraftOutput(_through(rest, add_silu(around_first(joined), first(joined))), joined)

    return advance


def _mlp(projection: LinearLayer, weight: Weights, bias: Weights, token_scale: float) -> Advance:
    norm_weight, norm_bias = constant(weight), constant(bias)

    def advance(state: Tensor, token: Tensor) -> DraftOutput:
        normed, _ = rms_norm(token, norm_weight, _MLP_EPS, projection(state, paddle.float32), token_scale)
        following = bias_gelu(normed, norm_bias)
        return DraftOutput(following, following)

    return advance


def _of_scaled(advance: Advance, hidden_size: int) -> Advance:
    """Return `advance` of a state that is normalised, and then divided by the square root of 2."""
    weight = constant(np.full(hidden_size, math.sqrt(0.5), np.float32))
    return lambda state, token: advance(rms_norm(state, weight, _MLP_EPS)[0], token)


def _through(blocks: Sequence[LinearLayer], x: Tensor) -> Tensor:
    return functools.reduce(lambda rows, block: add_silu(rows, block(rows)), blocks, x)
