"""A recorded pass gives the bits of the eager one: hidden rows, logits, and the KV it stores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.layers.attention import AttentionInputs
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.norm import rms_norm
from fastdeploy_sd.ops.operators import declared_ops
from fastdeploy_sd.runtime import library, paddle_ops
from fastdeploy_sd.runtime.recorder import RecordingError
from fastdeploy_sd.step_memory import StepLimits, StepMemory
from fastdeploy_sd.worker import kv_sizing, kv_tensors
from fastdeploy_sd.worker.forward import EagerForward, Forward, RecordedForward
from fastdeploy_sd.worker.rotary import make_rotary
from tests.models import golden
from tests.ops.backends import isa, threads

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 96, 256
# Tokens that each request runs in a step, and whether all of their logits are wanted, else the last one's.
STEPS: list[tuple[list[int], bool]] = [
    ([3], False),
    ([1, 1, 1], False),
    ([5], True),
    ([70, 2, 1, 9], False),
    ([1], False),
    ([4, 4, 4, 4, 4, 4], True),
    ([130], True),
    ([1, 1], True),
]


class Model:
    """A golden model with two KV caches of its own, one for each way to run it."""

    def __init__(self, name: str, dtype: str, quantization: str | None = None, *, is_int8_kv: bool = False) -> None:
        paddle_ops.load(declared_ops())
        checkpoint = Checkpoint(golden.ROOT / name)
        config = read_decoder_config(checkpoint.config)
        self.decoder = Decoder(checkpoint, config, QuantScheme.create(dtype, quantization))  # type: ignore[arg-type]
        kv_format = kv_sizing.KvCacheFormat(BLOCK_SIZE, dtype, is_int8_kv)
        layers = kv_sizing.LayerKv.of_decoder(config)
        self.eager_caches, self.caches = (kv_tensors.allocate(layers, NUM_BLOCKS, kv_format) for _ in range(2))
        rotary = make_rotary(config, MAX_LEN)
        self.memory = StepMemory(StepLimits(8, 256, 255), config.vocab_size)
        self.tables = np.full((8, NUM_BLOCKS), -1, np.int32)
        over = rotary, self.memory, self.tables
        self.eager = EagerForward(self.decoder, self.eager_caches, *over)
        self.recorded = RecordedForward(self.decoder, self.caches, *over)

    def load(self, step: Step) -> None:
        """Make it the step that the memory holds; request r is in table row 7 - r."""
        m = self.memory
        m.num_requests, m.num_tokens, m.num_logits = map(len, (step.seq_lens, step.positions, step.logits_indices))
        m.table_rows[: m.num_requests] = 7 - np.arange(m.num_requests)
        self.tables[m.table_rows[: m.num_requests], : step.blocks.shape[1]] = step.blocks
        for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices"):
            column = getattr(step, name)
            getattr(m, name)[: len(column)] = column

    def bits(self, forward: Forward) -> list[np.ndarray]:
        """Run the step; its hidden rows and logits."""
        forward()
        hidden = np.asarray(forward.hidden[: self.memory.num_tokens].numpy())
        return [hidden.copy(), forward.logits[: self.memory.num_logits].copy()]


class Step(NamedTuple):
    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    blocks: Any
    logits_indices: Any


def batches(steps: Sequence[tuple[list[int], bool]]) -> list[Step]:
    """Steps of requests that go on from step to step; request r has the blocks r, r + R, r + 2 R and so on."""
    rng = np.random.default_rng(0)
    num_requests = max(len(counts) for counts, _ in steps)
    max_blocks = NUM_BLOCKS // num_requests
    tables = (np.arange(num_requests)[:, None] + num_requests * np.arange(max_blocks)).astype(np.int32)
    lengths = np.zeros(num_requests, np.int32)
    return [_batch(rng, lengths, tables, *step) for step in steps]


def _batch(rng: np.random.Generator, lengths: Any, tables: Any, counts: list[int], wants_all: bool) -> Step:
    n = np.array(counts, np.int32)
    starts = np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
    rows = np.repeat(np.arange(len(n)), n)
    positions = (lengths[rows] + np.arange(starts[-1]) - starts[rows]).astype(np.int32)
    blocks = tables[rows, positions // BLOCK_SIZE].astype(np.int64)
    lengths[: len(n)] += n
    seq_lens = lengths[: len(n)].copy()
    num_columns = -(-int(seq_lens.max()) // BLOCK_SIZE)
    return Step(
        input_ids=rng.integers(4, 4000, starts[-1]).astype(np.int32),
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start_loc=starts,
        seq_lens=seq_lens,
        blocks=tables[: len(n), :num_columns],
        logits_indices=np.arange(starts[-1], dtype=np.int32) if wants_all else starts[1:] - 1,
    )


def cache_bits(caches: Sequence[KvCache[Any]]) -> list[np.ndarray]:
    parts = [part for cache in caches for part in (cache.k, cache.v, cache.k_scale, cache.v_scale) if part is not None]
    return [np.asarray(part.numpy()) for part in parts]


def assert_same(model: Model, steps: Sequence[tuple[list[int], bool]]) -> None:
    for step in batches(steps):
        model.load(step)
        for got, wanted in zip(model.bits(model.recorded), model.bits(model.eager), strict=True):
            np.testing.assert_array_equal(got, wanted)
    stored = cache_bits(model.caches)
    assert any(part.any() for part in stored)
    for got, wanted in zip(stored, cache_bits(model.eager_caches), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", golden.NAMES)
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

    rotary = make_rotary(model.decoder.config, MAX_LEN)
    hooked = RecordedForward(model.decoder, model.caches, rotary, model.memory, model.tables, on_stored)
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

    monkeypatch.setattr("tests.models.test_recorded_forward.Decoder", Curious)
    with pytest.raises(RecordingError, match="size num_tokens: expected no decision by it while a pass is recorded"):
        Model("llama-tiny", "bfloat16")
