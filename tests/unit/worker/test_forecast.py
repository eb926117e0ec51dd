"""What a configuration comes to, without loading anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.loading.engine_rows import host_rows, num_copies
from fastdeploy_sd.worker.loading.forecast import forecast

GIB = 1 << 30
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def test_the_rows_follow_from_options_checkpoint_and_memory() -> None:
    rows = forecast(config_from_kwargs(model="demo", speculative_config=MTP), lambda: 64 * GIB)
    assert rows["weights"] == "0.02 GB in files, 0.02 GB of linear layers as bfloat16"
    assert rows["KV cache"].startswith("131072 tokens in 2048 blocks of 64, ")
    assert rows["longest request"] == "4096 tokens, prompt and output"
    assert rows["drafting"] == "up to 3 by mtp"
    assert "forecast" not in rows


@pytest.mark.parametrize("device", ["gpu", "auto"])
def test_without_a_gpu_it_says_why_the_memory_is_the_cpus(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", "/nowhere/libfdsd_cuda.so")
    rows = forecast(config_from_kwargs(model="demo", device=device), lambda: 64 * GIB)
    assert next(iter(rows.items())) == (
        "forecast",
        "with main memory, as of device cpu: no CUDA kernels at /nowhere/libfdsd_cuda.so",
    )


def test_places_for_adapters_are_counted() -> None:
    options = {"enable_lora": True, "max_loras": 50, "max_lora_rank": 64}
    rows = [
        forecast(
            config_from_kwargs(model="demo", speculative_config="naive", data_parallel_size=2, **more), lambda: GIB
        )
        for more in ({}, options)
    ]
    assert "LoRA adapters" not in rows[0]
    assert rows[1]["LoRA adapters"] == "50 places for adapters of rank 64, 0.31 GB"


def test_a_small_memory_bounds_requests() -> None:
    rows = forecast(config_from_kwargs(model="demo", speculative_config="naive"), lambda: 30 << 20)
    assert rows["longest request"].endswith("(the model's 4096 do not fit into the KV cache)")
    assert rows["drafting"] == "none"


@pytest.mark.parametrize(("folder", "copies", "total"), [(None, 3, "0.53"), ("packed", 1, "0.51")])
def test_engines_have_parts_of_the_machine(folder: str | None, copies: int, total: str, tmp_path: Path) -> None:
    """Each its KV cache; those of one command have one copy of the weights, those of others unless they map a file."""
    options: dict[str, object] = {} if folder is None else {"packed_weights_cache": str(tmp_path / folder)}
    found = [
        forecast(config_from_kwargs(model="demo", speculative_config="naive", **options, **parallel), lambda: GIB)
        for parallel in ({"data_parallel_size": 3}, {"data_parallel_size": 3, "local_data_parallel_id": 1})
    ]
    assert [row for row in found[0] if row.startswith("engine")] == ["engines", "engine 0", "engine 1", "engine 2"]
    assert [row for row in found[1] if row.startswith("engine")] == ["engines", "engine 1"]
    assert found[1]["engines"] == "3, number 1 from this command"
    assert "; 0.51 GiB in all: one copy of the weights for all" in found[0]["memory of engines"]
    how = "one copy" if copies == 1 else "3 copies"
    assert f"; {total} GiB in all: {how} of the weights" in found[1]["memory of engines"]
    assert ", among 3 engines" in found[0]["KV cache"]


@pytest.mark.parametrize(("count", "copies"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 2), (9, 2)])
def test_there_is_a_copy_of_the_weights_for_each_memory_node(
    count: int, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of three cores; the second of three engines lies on both."""
    for node, processors in enumerate(("0-2", "3-5")):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").write_text(processors)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert num_copies(config_from_kwargs(model="demo", data_parallel_size=count), tmp_path) == copies


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"tensor_parallel_size": 2}, ("rank 0", "rank 1")),
        ({"tensor_parallel_size": 4}, ("ranks 0 to 1", "ranks 2 to 3")),
        ({"data_parallel_size": 4, "enable_expert_parallel": True}, ("engines 0 to 1", "engines 2 to 3")),
    ],
)
def test_hosts_have_ranks_or_engines_in_order(options: dict[str, object], texts: tuple[str, str]) -> None:
    config = config_from_kwargs(model="demo", ips="127.0.0.1,127.0.0.2", node_rank=1, **options)
    assert host_rows(config) == {"host 127.0.0.1": texts[0], "host 127.0.0.2": texts[1]}


def test_it_is_what_the_executor_does() -> None:
    from fastdeploy_sd.worker.executor import create_executor

    config = config_from_kwargs(model="demo", kv_cache_memory_gb=0.02, speculative_config=MTP)
    executor = create_executor(config)
    try:
        info = executor.model_info
    finally:
        executor.shutdown()
    rows = forecast(config)
    assert rows["KV cache"].startswith(f"{info.num_blocks * 64} tokens in {info.num_blocks} blocks")
    assert rows["longest request"].startswith(f"{info.max_request_tokens} tokens")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_model_len": 5000}, "max_model_len: expected at most the checkpoint's 4096, got 5000"),
        ({"speculative_config": MTP | {"model": "nowhere"}}, "speculative_config.model: expected"),
    ],
)
def test_what_the_checkpoint_cannot_do_is_an_error(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forecast(config_from_kwargs(model="demo", **options))
    assert caught.value.message.startswith(text)


def test_paddle_is_not_needed() -> None:
    code = "import sys; sys.modules['paddle'] = None; import fastdeploy_sd.worker.loading.forecast"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
