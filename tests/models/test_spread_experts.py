"""Where experts are spread over ranks, each packs its own, and all agree on the numbers of layers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.config import Config, ModelConfig, ParallelConfig, SpeculativeConfig, config_from_kwargs
from fastdeploy_sd.device.expert_service import ExpertService, expert_segment
from fastdeploy_sd.device.expert_types import ExpertSlot
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.linear import ExpertGroup, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import DecoderShard, linear_experts
from fastdeploy_sd.models.weights import packer
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard
from fastdeploy_sd.worker.loading.draft_weights import open_draft_weights
from fastdeploy_sd.worker.loading.forecast import forecast
from fastdeploy_sd.worker.loading.model_loading import load_model
from fastdeploy_sd.worker.ranks.expert_ranks import leave_experts, service_shape
from tests.models import golden
from tests.models.mtp_models import make_model

pytestmark = pytest.mark.slow

NAME = "qwen3_moe-tiny"
SCHEME = QuantScheme.create("bfloat16", "wint8")


@contextlib.contextmanager
def services(config: Config) -> Iterator[list[ExpertService]]:
    """One service for each rank of a configuration."""
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config)
    shape = service_shape(config, decoder, open_draft_weights(config, checkpoint, decoder))
    with contextlib.ExitStack() as stack:
        file = expert_segment()
        stack.callback(os.close, file)
        found = []
        for rank in range(shape.num_ranks):
            found.append(ExpertService.open(file, rank, shape))
            stack.callback(found[-1].close)
        yield found


def config_of(path: Path, num_engines: int, speculative: SpeculativeConfig | None = None) -> Config:
    parallel = ParallelConfig(data_parallel_size=num_engines, enable_expert_parallel=True)
    return Config(ModelConfig(str(path)), parallel=parallel, speculative=speculative or SpeculativeConfig())


def packed(group: TpGroup) -> tuple[list[bytes], list[bytes]]:
    """Return what a rank packs of a golden model: experts, and everything else."""
    checkpoint, others, spread = Checkpoint(golden.ROOT / NAME), PackedMatrices(None), PackedMatrices(None)
    config = read_decoder_config(checkpoint.config)
    packer = WeightPacker(checkpoint, others, spread_store=spread)
    builder = LayerBuilder(config, SCHEME, packer, group)
    for i in range(config.num_layers):
        builder.layer(DecoderWeights(checkpoint, config), i)
    if group.experts is None:
        spread = PackedMatrices(None)
        for name in [name for name in others if " experts from " in name]:
            spread.add(name, others[name])
    rest = [others[name].tobytes() for name in others if " experts from " not in name]
    return [data.tobytes() for data in spread.values()], rest


def test_ranks_pack_each_expert_once_and_the_rest_as_without() -> None:
    whole, rest = packed(TpGroup())
    parts = []
    with services(config_of(golden.ROOT / NAME, 3)) as found:
        for service in found:
            experts, others = packed(TpGroup(None, ExpertGroup(service)))
            assert others == rest
            parts.append(experts)
    assert [b"".join(of_ranks) for of_ranks in zip(*parts, strict=True)] == whole
    counts = {len(part[0]) * 8 // len(whole[0]) for part in parts}  # of eight experts
    assert counts == {2, 3}


def test_experts_are_consecutive_and_counts_differ_by_one() -> None:
    for num_experts in range(1, 40):
        for num_ranks in range(1, num_experts + 1):
            found = linear_experts(num_experts, num_ranks)
            assert [e for own in found for e in own] == [*range(num_experts)]
            assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("num_steps", "is_whole"), [(2, False), (1, False), (2, True)])
def test_layers_of_drafters_have_numbers_after_the_targets(num_steps: int, is_whole: bool, tmp_path: Path) -> None:
    path = make_model(tmp_path, NAME, "numbered", 2).path
    speculative = SpeculativeConfig(
        "mtp", num_steps, num_model_steps=num_steps, draft_tensor_parallel_size=1 if is_whole else None
    )
    config = config_of(path, 2, speculative)
    checkpoint = Checkpoint(path)
    decoder = read_decoder_config(checkpoint.config)
    with services(config) as found:
        for service in found:
            drafts = open_draft_weights(config, checkpoint, decoder)
            load_model(config, checkpoint, decoder, drafts, TpGroup(None, ExpertGroup(service)))
            service.start()
        num_layers = decoder.num_layers + num_steps * (not is_whole)
        assert found[0].shape.num_layers == num_layers
        for layer in range(num_layers):
            assert found[0].placement(layer).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_engines_share_a_file_of_packed_weights_and_have_one_for_experts(tmp_path: Path) -> None:
    config = config_of(golden.ROOT / NAME, 2)
    model = ModelConfig(config.model.model, packed_weights_cache=str(tmp_path))
    config = Config(model, parallel=config.parallel)
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config)
    times = dict[str, int]()
    for _ in range(2):
        with services(config) as found:
            for service in found:
                load_model(config, checkpoint, decoder, {}, TpGroup(None, ExpertGroup(service)))
        found_times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.packed")}
        assert len(found_times) == 3
        assert not times or times == found_times  # the second start writes nothing
        times = found_times
    assert sum("-target-experts-" in path.name for path in tmp_path.glob("*.packed")) == 2


def test_a_file_holds_experts_that_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, as it was packed at a start, whatever is written over it later."""
    base = config_of(golden.ROOT / NAME, 2)
    config = replace(base, model=ModelConfig(base.model.model, packed_weights_cache=str(tmp_path)))
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config)
    pack_into = packer._pack_into

    def pack_no_expert(data: Bytes, matrix: WeightMatrix, form: packer._Form) -> None:
        assert ".experts." not in matrix.name, "packed again"
        pack_into(data, matrix, form)

    def moved() -> dict[int, bytes]:
        """Move an expert of rank 1 to rank 0 and back; return those of the first layer."""
        with services(config) as found:
            groups = [ExpertGroup(service, num_redundant=0) for service in found]
            for group in groups:
                load_model(config, checkpoint, decoder, {}, TpGroup(None, group))
            experts = {place.expert: _bytes_of(group, place) for group in groups for place in group.moves[0].places}
            own, other = groups[0].moves[0].places[0], groups[1].moves[0].places[0].expert
            pack = groups[0].moves[0].pack
            monkeypatch.setattr(packer, "_pack_into", pack_into)  # a rank's file has no experts of others
            assert _bytes_of(groups[0], pack(other, own)) == experts[other]
            assert _bytes_of(groups[0], pack(own.expert, own)) == experts[own.expert]
            return experts

    experts = moved()
    assert set(experts) == set(range(8))

    monkeypatch.setattr(packer, "_pack_into", pack_no_expert)
    assert moved() == experts


def _bytes_of(group: ExpertGroup, place: ExpertSlot) -> bytes:
    """The packed matrix of an expert's gate_up."""
    first, second = group.moves[0].places[:2]
    return ctypes.string_at(place.gate_up, second.gate_up - first.gate_up)


def test_a_rank_that_others_need_is_not_gone() -> None:
    config, checkpoint = config_of(golden.ROOT / NAME, 2), Checkpoint(golden.ROOT / NAME)
    with services(config) as [first, second]:
        for service in (first, second):
            group = TpGroup(None, ExpertGroup(service))
            load_model(config, checkpoint, read_decoder_config(checkpoint.config), {}, group)
            service.start()
        leave_experts(first, 0.7)  # longer than one look
        assert first.states() == ("leaving", "serving")
        leaving = threading.Thread(target=leave_experts, args=(first, 60.0))
        leaving.start()
        leave_experts(second, 60.0)
        leaving.join()
        assert first.states() == ("gone", "gone")


def test_more_ranks_than_experts_are_refused() -> None:
    decoder = read_decoder_config(Checkpoint(golden.ROOT / NAME).config)
    DecoderShard(decoder, WHOLE_MODEL, Shard(7, 8)).verify()
    text = "enable_expert_parallel: expected at most 8 ranks, as the checkpoint's config.json has num_local_experts: 8"
    with pytest.raises(ConfigError, match=text):
        DecoderShard(decoder, WHOLE_MODEL, Shard(0, 9)).verify()


def test_a_model_without_experts_is_refused() -> None:
    config = config_from_kwargs(model="demo", enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="enable_expert_parallel: expected false, as the checkpoint has no experts"):
        forecast(config)


def test_an_engine_alone_waits_for_no_experts_of_others() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size: expected 1 with enable_expert_parallel, as one engine"):
        create_executor(config_of(golden.ROOT / NAME, 2))


def test_the_forecast_says_what_a_rank_has() -> None:
    rows = forecast(
        config_from_kwargs(model=str(golden.ROOT / NAME), data_parallel_size=3, enable_expert_parallel=True)
    )
    assert rows["experts"].startswith("2 or 3 of 8 of 3 layers on each of 3 ranks, 0.00 GB; up to ")
