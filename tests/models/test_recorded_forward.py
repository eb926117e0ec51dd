"""A recorded pass gives the bits of the eager one: hidden rows, logits, and the KV it stores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.device.program.recorder import RecordingError
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.rowwise import rms_norm
from fastdeploy_sd.worker.loading.rotary import make_rotary
from fastdeploy_sd.worker.step.forward import ForwardPass, RecordedForward
from tests.models import golden
from tests.models.steps import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, STEPS, Model, batches, cache_bits
from tests.ops.backends import isa, threads

pytestmark = pytest.mark.slow


def assert_same(model: Model, steps: Sequence[tuple[list[int], bool]]) -> None:
    for step in batches(steps):
        model.load(step)
        for got, wanted in zip(model.bits(model.recorded), model.bits(model.eager), strict=True):
            np.testing.assert_array_equal(got, wanted)
    stored = cache_bits(model.caches)
    assert any(part.any() for part in stored)
    for got, wanted in zip(stored, cache_bits(model.eager_caches), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(golden.FIRST, ("float32", "bfloat16")),
        *((name, "bfloat16") for name in golden.NAMES if name not in golden.FIRST),
    ],
)
def test_every_architecture(name: str, dtype: str) -> None:
    assert_same(Model(name, dtype), STEPS)


@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
@pytest.mark.parametrize("name", ["qwen3-tiny", "ernie4_5_moe-tiny"])
def test_every_weight_format(name: str, quantization: str) -> None:
    assert_same(Model(name, "bfloat16", quantization), STEPS)


def test_int8_kv() -> None:
    assert_same(Model("qwen3-tiny", "bfloat16", is_int8_kv=True), STEPS)


@pytest.mark.parametrize("level", library.available_isas())
@pytest.mark.parametrize("count", [1, 3])
def test_every_isa_level_and_number_of_threads(level: str, count: int) -> None:
    with isa(level), threads(count):
        assert_same(Model("qwen3_moe-tiny", "bfloat16"), STEPS[:5])


@pytest.mark.parametrize(
    ("name", "quantization"), [("qwen3-tiny", None), ("qwen3_moe-tiny", "wint4"), ("ernie4_5_moe-tiny", "wint8")]
)
def test_whole_steps_have_the_same_bits_with_any_number_of_threads(name: str, quantization: str | None) -> None:
    """Hidden rows, logits and KV; with as many at once as there are, and in turn where there are fewer processors."""

    def bits(num_threads: int, num_processors: int | None = None) -> list[bytes]:
        model = Model(name, "bfloat16", quantization)
        library.set_num_threads(num_threads, num_processors)
        found = []
        for step in batches(STEPS):
            model.load(step)
            found += [part.tobytes() for part in model.bits(model.recorded)]
        return [*found, *(part.tobytes() for part in cache_bits(model.caches))]

    with threads(1):
        wanted = bits(1)
        for count in (2, 5, 16, 64):
            assert bits(count) == wanted
        assert bits(20, num_processors=20) == wanted


def test_the_isa_level_and_the_threads_may_change_after_recording() -> None:
    model = Model("qwen2-tiny", "float32")
    with isa("scalar"), threads(3):
        assert_same(model, STEPS[:4])


def test_a_step_without_logits() -> None:
    """A chunk of a prompt that goes on."""
    model, [step] = Model("llama-tiny", "bfloat16"), batches([([9, 3], False)])
    model.load(step._replace(logits_indices=step.positions[:0]))
    got, wanted = model.bits(model.recorded), model.bits(model.eager)
    assert got[1].shape[0] == wanted[1].shape[0] == 0
    np.testing.assert_array_equal(got[0], wanted[0])


@pytest.mark.parametrize("forward", ["eager", "recorded"])
def test_a_wrong_slot_is_refused(forward: str) -> None:
    model, [step] = Model("llama-tiny", "bfloat16"), batches([([9], False)])
    step.slot_mapping[3] = NUM_BLOCKS * BLOCK_SIZE
    model.load(step)
    with pytest.raises(ValueError, match="slot_mapping: expected"):
        getattr(model, forward)()


def test_calls_can_be_put_behind_every_layers_kv() -> None:
    """What KV transfer needs: a call between a layer's store and its attention, with the step's rows at hand."""
    model, [step] = Model("llama-tiny", "float32"), batches([([9, 3], False)])
    seen: list[KvCache[Any]] = []

    def on_stored(cache: KvCache[Any], inputs: AttentionInputs) -> None:
        seen.append(cache)
        gather_output_rows(paddle.ones([8, 4]), inputs.blocks.table_rows)

    rotary = make_rotary(model.decoder.config, MAX_LEN, MAX_LEN)
    forward_pass = ForwardPass(model.decoder, model.caches, rotary, on_stored)
    hooked = RecordedForward(forward_pass, model.memory, [model.tables])
    assert seen == model.caches
    model.load(step)
    got, wanted = model.bits(hooked), model.bits(model.eager)
    np.testing.assert_array_equal(got[1], wanted[1])
    names, _ = hooked.program.timed_run(hooked.sizes)
    behind = [after for name, after in itertools.pairwise(names) if name == "rope_store_kv"]
    assert behind == ["gather_output_rows"] * len(model.caches)


def test_a_model_that_looks_at_values_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Curious(Decoder):
        def forward(self, *args: Any) -> Any:
            hidden = super().forward(*args)
            return hidden if hidden.shape[0] == 1 else rms_norm(hidden, hidden, 1e-5)[0]

    monkeypatch.setattr("tests.models.steps.Decoder", Curious)
    with pytest.raises(RecordingError, match="size num_tokens: expected no decision by it while a pass is recorded"):
        Model("llama-tiny", "bfloat16")
