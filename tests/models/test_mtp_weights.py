"""Where MTP weights are looked for, under which names, and what does not fit a target."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder import Decoder, Embedding
from fastdeploy_sd.models.drafters import draft_parts
from fastdeploy_sd.models.drafters.draft_layers import DraftLayers
from fastdeploy_sd.models.drafters.draft_model import TargetParts
from fastdeploy_sd.models.drafters.mtp import build_mtp_model
from fastdeploy_sd.models.drafters.mtp_weights import MtpWeights, open_mtp_weights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.weight_matrix import FloatPart
from fastdeploy_sd.worker.kv import kv_memory, kv_sizing
from fastdeploy_sd.worker.kv.kv_sizing import LayerKv
from tests.models import golden, rewrite
from tests.models.mtp_models import make_model

NAME = "ernie4_5-tiny"
FLOAT32 = QuantScheme.create("float32", None)


def open_weights(path: pathlib.Path, directory: str | None = None) -> MtpWeights:
    target = Checkpoint(path)
    return open_mtp_weights(target, read_decoder_config(target.config), directory)


def tensors_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: np.array(checkpoint._tensor(name)) for name in checkpoint.names()}


def test_weights_are_found_beside_and_inside_the_target(tmp_path: pathlib.Path) -> None:
    folder = make_model(tmp_path / "a", NAME, "ernie-folder").path
    inside = make_model(tmp_path / "b", NAME, "numbered").path
    assert open_weights(folder).path == folder / "mtp"
    assert open_weights(inside).path == inside
    assert open_weights(inside, str(inside)).path == inside
    assert open_weights(inside, str(folder / "mtp")).path == folder / "mtp"


def test_error_says_where_weights_were_looked_for(tmp_path: pathlib.Path) -> None:
    plain = golden.ROOT / NAME
    with pytest.raises(ConfigError, match=rf"speculative_config\.model: .* in {plain / 'mtp'} or {plain}, found none"):
        open_weights(plain)
    with pytest.raises(ConfigError, match=rf"tensors like ernie\.mtp_emb_norm.* in {plain}, found none"):
        open_weights(plain, str(plain))
    with pytest.raises(ConfigError, match=r"^speculative_config\.model: expected a checkpoint directory.*missing"):
        open_weights(plain, str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 256), ("vocab_size", 4000), ("num_key_value_heads", 4), ("head_dim", 64)],
)
def test_geometry_must_be_the_targets(key: str, value: int, tmp_path: pathlib.Path) -> None:
    path = make_model(tmp_path, NAME, "ernie-folder").path
    config = json.loads((path / "mtp" / "config.json").read_text())
    (path / "mtp" / "config.json").write_text(json.dumps(config | {key: value}))
    name = "num_kv_heads" if key == "num_key_value_heads" else key
    with pytest.raises(CheckpointError, match=rf"mtp: {name}: expected \d+ as in the target .*, got {value}"):
        open_weights(path)


def test_numbers_have_no_gap_and_are_as_many_as_declared(tmp_path: pathlib.Path) -> None:
    path = make_model(tmp_path, NAME, "numbered", 2).path
    tensors = tensors_of(Checkpoint(path))
    kept = {n: v for n, v in tensors.items() if ".layers.4." not in n}
    rewrite.write_file(path / "model.safetensors", kept, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: expected as many .* stored, 1, got 2"):
        open_weights(path)
    moved = {n.replace(".layers.4.", ".layers.5."): v for n, v in tensors.items()}
    rewrite.write_file(path / "model.safetensors", moved, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"numbered without a gap, got \(3, 5\)"):
        open_weights(path)


def test_experts_need_a_config_that_describes_them(tmp_path: pathlib.Path) -> None:
    path = make_model(tmp_path, "ernie4_5_moe-tiny", "numbered").path
    assert open_weights(path).config.moe is not None
    config: dict[str, Any] = json.loads((path / "config.json").read_text()) | {"architectures": ["Ernie4_5ForCausalLM"]}
    dense = {key: value for key, value in config.items() if not key.startswith("moe_")}
    (path / "config.json").write_text(json.dumps(dense))
    with pytest.raises(CheckpointError, match="expected the experts of the MTP layers, found none"):
        open_weights(path)


def test_a_projection_that_a_converter_left_the_other_way_round_is_read(tmp_path: pathlib.Path) -> None:
    path = make_model(tmp_path, NAME, "ernie-folder").path
    expected = open_weights(path).projection(0)[0].to_array()
    file = path / "mtp" / "model.safetensors"
    checkpoint = Checkpoint(path / "mtp")
    tensors = tensors_of(checkpoint)
    name = next(n for n in tensors if "mtp_linear_proj" in n and n.endswith("weight"))
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    rewrite.write_file(file, tensors, {"format": "pt"})
    np.testing.assert_array_equal(open_weights(path).projection(0)[0].to_array(), expected)


def test_a_missing_tensor_of_a_draft_layer_is_named(tmp_path: pathlib.Path) -> None:
    weights = open_weights(make_model(tmp_path, NAME, "ernie-folder").path)
    weights.verify(1)
    name = next(name for name in weights.checkpoint.names() if "down_proj" in name)
    weights.checkpoint.tensors = {n: info for n, info in weights.checkpoint.tensors.items() if n != name}
    with pytest.raises(CheckpointError, match=f"expected a tensor '{name}'"):
        weights.verify(1)


@pytest.mark.parametrize("value", [-1, 1.5, "one", [1], True, 10**400])
def test_the_number_of_draft_layers_is_a_number(tmp_path: pathlib.Path, value: object) -> None:
    path = make_model(tmp_path, NAME, "ernie-folder").path / "mtp" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": value}))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers: expected a number of layers, got"):
        open_weights(path.parent.parent)


def test_paddle_names_and_layout_give_the_same_weights(tmp_path: pathlib.Path) -> None:
    path = make_model(tmp_path, NAME, "ernie-folder").path
    tensors = tensors_of(Checkpoint(path / "mtp"))
    other = tmp_path / "paddle"
    other.mkdir()
    shutil.copy(path / "mtp" / "config.json", other)
    rewrite.write_file(other / "model.safetensors", rewrite.to_paddle_names(tensors, fused=True))
    ours, theirs = open_weights(path), open_weights(path, str(other))
    for role in ("projection", "qkv", "output", "gate_up", "down"):
        got, want = (getattr(weights, role)(0)[0].to_array() for weights in (theirs, ours))
        np.testing.assert_array_equal(got, want, err_msg=role)
    np.testing.assert_array_equal(ours.embedding_norm(0), theirs.embedding_norm(0))


def build(path: pathlib.Path, num_steps: int, packed: PackedMatrices | None = None) -> DraftLayers:
    """The draft layers; `packed` takes the matrices that are packed for them alone."""
    checkpoint = Checkpoint(path)
    config = read_decoder_config(checkpoint.config)
    decoder, weights = Decoder(checkpoint, config, FLOAT32), open_mtp_weights(checkpoint, config, None)
    packer = WeightPacker(checkpoint, packed)
    target = TargetParts(decoder, DecoderWeights(checkpoint, config), packer, FLOAT32.lm_head)
    return build_mtp_model(target, weights, FLOAT32, WeightPacker(weights.checkpoint, packed), num_steps)


def test_several_layers_make_one_step_each_and_one_makes_all(tmp_path: pathlib.Path) -> None:
    two = make_model(tmp_path / "two", NAME, "ernie-inside", 2).path
    assert build(two, 1).num_layers == 1
    assert build(two, 2).num_layers == 2
    with pytest.raises(ConfigError, match=r"num_model_steps: expected at most the 2 MTP layers of .*, got 3"):
        open_weights(two).verify(3)
    assert build(make_model(tmp_path / "one", NAME, "ernie-inside").path, 5).num_layers == 1


@pytest.mark.parametrize(("layout", "num_copies"), [("numbered", 0), ("numbered-own", 1)])
def test_only_what_differs_from_the_target_is_kept_twice(
    layout: str, num_copies: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[FloatPart] = []

    def noted(table: FloatPart, scheme: QuantScheme, packer: WeightPacker) -> Embedding:
        tables.append(table)
        return Embedding(table, scheme, packer)

    monkeypatch.setattr(draft_parts, "Embedding", noted)
    packed = PackedMatrices(None)
    path = make_model(tmp_path, NAME, layout).path
    build(path, 1, packed)
    heads = [name for name in packed if "head" in name or "embed_tokens" in name]
    assert (len(tables), len(heads)) == (num_copies, num_copies)


def test_blocks_count_the_draft_layers() -> None:
    config = read_decoder_config(Checkpoint(golden.ROOT / NAME).config)
    fmt = kv_sizing.KvCacheFormat(16, "bfloat16")
    target = LayerKv.of_decoder(config)
    with_one, with_two = (target + LayerKv.of_draft_layers(config, count) for count in (1, 2))
    one = kv_sizing.block_bytes(target, fmt)
    per_layer = one // config.num_layers
    assert kv_sizing.block_bytes(with_two, fmt) == one + 2 * (per_layer + 2 * config.hidden_size)
    assert kv_sizing.block_bytes(with_one, fmt) == one + per_layer + 2 * config.hidden_size
    caches = kv_memory.allocate(with_two, 3, fmt)
    assert [c.first_key for c in caches] == [0] * config.num_layers + [1, 2]
