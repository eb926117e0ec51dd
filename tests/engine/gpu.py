"""Engines on a GPU for tests: the emulated one, on which the kernels' own source runs on the CPU, or a real one."""

from __future__ import annotations

import functools
import gc
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import Answer, EngineVariant, make_requests, run_alone
from fastdeploy_sd.cli.verify.requests import GRAMMARS
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from fastdeploy_sd.device.cuda.device import cuda_device
from fastdeploy_sd.device.cuda.library import CudaLibrary, usable_library
from fastdeploy_sd.device.cuda.sharing import num_devices
from fastdeploy_sd.device.device import choose
from fastdeploy_sd.types import DraftTokens, Request, RequestId
from fastdeploy_sd.worker.step.runner import ModelRunner
from tests.models import rewrite
from tests.models.mtp_models import layout_of, make_model
from tests.ops.cuda_device import EMULATED, library_path, require

_PROMPT_LEN, _OUTPUT_LEN, _NUM_REQUESTS = 30, 6, 12
# Of the golden models, as every step of the emulated kernels takes as long as there are weights.
_NUM_LAYERS, NUM_TOKENS = 2, 1024
# Steps of few tokens: prompts are computed in parts, with requests that decode.
BATCH = EngineVariant("batch 4", 4, 24, long_prefill_token_threshold=10, arrivals_per_step=2, num_blocks=24)
# Blocks for four prompts, which begin alike, and for one of them to go on: some are preempted.
TIGHT = replace(
    BATCH, name="preemption, prefix cache", num_blocks=6, arrivals_per_step=_NUM_REQUESTS, num_requests=4,
    enable_prefix_caching=True, must_preempt=True, must_hit=True,
)  # fmt: skip


@contextmanager
def two_gpus() -> Iterator[None]:
    """Have two in the body, in the test's process and in those it starts; skips where there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FDSD_EMULATED_GPUS", "2")
        library = usable_library()
        assert isinstance(library, CudaLibrary), library
        if num_devices(library) < 2:
            pytest.skip("one GPU, and ranks want two")
        yield


@contextmanager
def gpu_device(kind: str) -> Iterator[None]:
    """Let `device gpu` be the emulated or the real one, by its name in tests.ops.cuda_device, in the body."""
    require(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FDSD_CUDA_LIBRARY", str(library_path(kind)))
        try:
            yield
        finally:
            choose(None)


@contextmanager
def leaves_no_streams(kind: str) -> Iterator[None]:
    """Verify that what the body opens has destroyed its streams and events when it ends; a real GPU does not count."""
    found = usable_library()
    assert isinstance(found, CudaLibrary), found
    choose(cuda_device(found))  # with streams of its own
    before = _num_handles(found, kind)
    yield
    assert _num_handles(found, kind) == before


def _num_handles(library: CudaLibrary, kind: str) -> list[int]:
    gc.collect()
    return [library.number(f"num_{what}") for what in ("streams", "events")] if kind == EMULATED else []


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def small_model(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A golden model cut short; `folder` is made."""
    rewrite.write_folder(folder, name)
    rewrite.write_file(folder / "model.safetensors", rewrite.read(name))
    return rewrite.cut(folder, _NUM_LAYERS, NUM_TOKENS)


@functools.cache
def _tiny_model() -> pathlib.Path:
    return small_model(pathlib.Path(_folder().name) / "model", "qwen3-tiny")


def model_with_layers(folder: pathlib.Path, name: str = "qwen3-tiny", num_layers: int = 1) -> pathlib.Path:
    """The same with draft layers; the target of the default one is that of tiny_config."""
    layout = layout_of(name)
    return rewrite.cut(make_model(folder, name, layout, num_layers).path, _NUM_LAYERS, NUM_TOKENS)


def tiny_config(path: pathlib.Path | None = None) -> Config:
    """A checkpoint of two narrow layers or another one, on a GPU."""
    return Config(
        ModelConfig(model=str(path or _tiny_model()), max_model_len=96),
        CacheConfig(block_size=16, num_blocks=24),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
        device="gpu",
    )


@functools.cache
def short_requests() -> Sequence[Request]:
    """One for every kind of sampling, one of them with a grammar; some of their prompts begin alike."""
    requests = [
        replace(r, prompt_token_ids=np.ascontiguousarray(r.prompt_token_ids[-_PROMPT_LEN:]), max_tokens=_OUTPUT_LEN)
        for r in make_requests(seed=3, count=_NUM_REQUESTS, vocab_size=NUM_TOKENS)
    ]
    begin = requests[0].prompt_token_ids[: TIGHT.block_size]
    for i in range(1, 4):
        own = requests[i].prompt_token_ids[len(begin) :]
        requests[i] = replace(requests[i], prompt_token_ids=np.concatenate([begin, own]))
    requests[2] = replace(requests[2], grammar=GRAMMARS[0])
    return requests


@functools.cache
def answers_alone(kind: str) -> Mapping[RequestId, Answer]:
    """What each of them gets by itself with plain decoding on such a GPU."""
    with gpu_device(kind):
        return run_alone(tiny_config(), short_requests())


@functools.cache
def block_requests() -> Sequence[Request]:
    """Three with prompts of two whole blocks and a bit, drawn from at random; the last two begin alike.

    Their log-probabilities tell of any change of KV, where tokens may not.
    """
    rng = np.random.default_rng(5)
    made = [
        replace(
            r,
            prompt_token_ids=rng.integers(4, 1000, 36 + 2 * i).astype(np.int32),
            sampling=replace(r.sampling, logprobs=1, prompt_logprobs=None),
            max_tokens=3,
            grammar="",
        )
        for i, r in enumerate(short_requests()[4:7])
    ]
    made[2].prompt_token_ids[:16] = made[1].prompt_token_ids[:16]
    return made


@functools.cache
def blocks_alone(kind: str) -> Mapping[RequestId, Answer]:
    """What each of them gets by itself with plain decoding on such a GPU."""
    with gpu_device(kind):
        return run_alone(tiny_config(), block_requests())


def note_drafts(runner: ModelRunner, patch: pytest.MonkeyPatch) -> Mapping[tuple[RequestId, int], Sequence[int]]:
    """Return what its steps in order draft from here on, by request and committed tokens."""
    noted: dict[tuple[RequestId, int], Sequence[int]] = {}
    propose = runner._drafting._propose

    def note(request_ids: tuple[RequestId, ...]) -> DraftTokens:
        drafts = propose(request_ids)
        for r, name in enumerate(request_ids):
            noted[name, runner._memory.num_committed.item(r)] = drafts.row(r).tolist()
        return drafts

    patch.setattr(runner._drafting, "_propose", note)
    return noted
