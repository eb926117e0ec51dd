"""What a server takes of a GPU's memory is told before it takes it, and its KV blocks get what is left."""

from __future__ import annotations

import gc
import pathlib
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.library import CudaLibrary, usable_library
from fastdeploy_sd.device.cuda.memory import Allocator
from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.shard import WHOLE_MODEL
from fastdeploy_sd.worker.executor import create_executor
from fastdeploy_sd.worker.kv import kv_sizing
from fastdeploy_sd.worker.loading import device_choice, gpu_memory
from fastdeploy_sd.worker.loading import forecast as forecasts
from fastdeploy_sd.worker.loading.forecast import forecast
from tests.engine.gpu import gpu_device
from tests.models import golden
from tests.models.mtp_models import make_model
from tests.ops.cuda_device import EMULATED

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[CudaLibrary]:
    with gpu_device(EMULATED):
        found = usable_library()
        assert isinstance(found, CudaLibrary)
        yield found


def config_of(path: pathlib.Path, speculative: SpeculativeConfig | None = None) -> Config:
    return Config(
        ModelConfig(str(path), max_model_len=512),
        CacheConfig(block_size=16, num_blocks=40),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
        speculative or SpeculativeConfig(),
        device="gpu",
    )


@pytest.mark.parametrize("more", ["nothing", "drafts", "adapters"])
def test_what_a_server_takes_is_no_more_than_was_told(
    more: str, gpu: CudaLibrary, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, KV and steps; and for steps more than a third of what was told, but for the graphs."""
    given: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()
    allocate = Allocator.allocate

    def noted(self: Allocator, num_bytes: int) -> DeviceMemory:
        memory = allocate(self, num_bytes)
        given.add(memory)
        return memory

    monkeypatch.setattr(Allocator, "allocate", noted)
    monkeypatch.setattr(gpu_memory, "_GRAPH_BYTES", 0)
    monkeypatch.setattr(device_choice, "cuda_device", CudaDevice)  # another test's has its memory already
    config = config_of(golden.ROOT / "qwen3-tiny")
    if more == "adapters":
        config = replace(config, lora=LoraConfig(enable_lora=True, max_loras=8, max_lora_rank=64))
    if more == "drafts":
        mtp = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
        config = config_of(make_model(tmp_path, "ernie4_5_moe-tiny", "ernie-folder").path, mtp)
    model = replace(forecasts._Model.open(config), max_model_len=512)
    told = model.memory_with_weights(gpu, WHOLE_MODEL)
    layers = kv_sizing.LayerKv.of_decoder(model.decoder) + model.draft_layers(WHOLE_MODEL)
    beside_steps = told.total - told.free + 40 * kv_sizing.block_bytes(layers, kv_sizing.KvCacheFormat.create(config))
    executor = create_executor(config)
    gc.collect()
    taken = sum(memory.num_bytes for memory in given) - beside_steps
    executor.shutdown()
    assert told.steps / 3 < taken < told.steps


def test_blocks_take_what_is_left_of_a_gpu(gpu: CudaLibrary) -> None:
    config = config_of(golden.ROOT / "qwen3-tiny")
    config = replace(config, cache=replace(config.cache, num_blocks=None, gpu_memory_utilization=0.25))
    rows = forecast(config)
    assert rows["GPU"] == f"{gpu.device_name}, 0.25 GiB, 0.25 of them free"
    parts = re.findall(r"([\d.]+) (\w+)", rows["GPU memory"])
    assert [name for _, name in parts] == ["weights", "steps", "KV", "unused"]
    assert sum(float(number) for number, _ in parts) == pytest.approx(0.25, abs=0.02)
    assert {name: number for number, name in parts}["unused"] == "0.19"
    assert "gpu_memory_utilization 0.25 of 0.25 GiB" in rows["KV cache"]
    executor = create_executor(config)
    num_tokens = executor.model_info.num_blocks * 16
    executor.shutdown()
    # The emulated GPU does not count what is allocated, so the weights' share is free there.
    assert num_tokens * 6 * 2 * 32 * 2 < 64 * MIB
    assert num_tokens > int(rows["KV cache"].split()[0])


def test_a_gpu_without_memory_for_a_block_is_an_error_that_says_what_is_taken() -> None:
    config = config_of(golden.ROOT / "qwen3-tiny")
    config = replace(config, cache=replace(config.cache, num_blocks=None, gpu_memory_utilization=0.02))
    wanted = (
        r"gpu_memory_utilization: expected what leaves memory for a KV block, 0\.000 GiB, got gpu_memory_utilization"
        r" 0\.02 of 0\.25 GiB, of which 0\.00 are taken and 0\.\d\d are for steps"
    )
    with gpu_device(EMULATED):
        with pytest.raises(ConfigError, match=wanted):
            create_executor(config)
        with pytest.raises(ConfigError, match="gpu_memory_utilization: expected what leaves memory for a KV block"):
            forecast(config)


def test_spread_experts_take_their_slots_and_what_ranks_exchange_rows_in(gpu: CudaLibrary) -> None:
    config = config_of(golden.ROOT / "qwen3_moe-tiny")

    def told(parallel: ParallelConfig) -> tuple[int, int, dict[str, str]]:
        own = replace(config, parallel=parallel)
        model = forecasts._Model.open(own)
        memory = model.memory_with_weights(gpu, WHOLE_MODEL)
        exchanged = model.exchanged_bytes(gpu) if parallel.enable_expert_parallel else 0
        return memory.total - memory.free, exchanged, forecast(own)

    of_one = sum(num_bytes for _, num_bytes in forecasts._Model.open(config).expert_bytes())  # of each layer
    whole, _, rows = told(ParallelConfig(data_parallel_size=2))
    assert "experts" not in rows
    spread = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
    parts, exchanged, rows = told(spread)
    assert exchanged > 2 * MIB  # what CUDA shares of memory is blocks of that
    assert parts == whole - 4 * of_one + exchanged
    assert rows["experts"].startswith("4 of 8 of ")
    assert rows["experts"].endswith(f"; {exchanged / 1e9:.2f} GB of each GPU's memory in which they exchange rows")
    assert f" {exchanged / 1024 / MIB:.2f} rows of experts, " in rows["GPU memory"]
    moving = replace(spread, enable_eplb=True, eplb_config=EplbConfig(redundant_experts_num=4))
    slots, more, rows = told(moving)
    assert slots == whole - of_one + more
    assert exchanged <= more
    assert rows["experts"].startswith("7 of 8 of ")
