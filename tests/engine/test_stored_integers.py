"""The promise for weights that are integers with a scale per group: the bytes of plain decoding, whatever drafts."""

from __future__ import annotations

import pathlib
import random
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import (
    PLAIN,
    Reference,
    compare,
    make_reference,
    quick_variants,
    run_cell,
    standard_methods,
)
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig
from fastdeploy_sd.hub import located
from tests.engine.handover_pairs import open_pair
from tests.engine.test_handover import DECODE, PREFILL
from tests.engine.test_ranks import on_ranks
from tests.models import gguf_files, quantized_files

pytestmark = pytest.mark.slow

# Types with minima and without, of 4, 5 and 8 bits; q, k and v differ.
TYPES = {"attn_v": "Q8_0", "attn": "Q5_0", "ffn_down": "Q5_1", "ffn": "Q4_1", "token": "Q8_0"}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("gguf")
    path = gguf_files.write(folder / "model.gguf", "llama-tiny", TYPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FDSD_CACHE_DIR", str(folder / "cache"))
        base = located(Config(ModelConfig(model=str(path), dtype="bfloat16"), CacheConfig()))
    assert pathlib.Path(base.model.model).is_dir()
    assert base.model.served_model_name == (str(path),)
    return make_reference(base, seed=3, count=24)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("method", ["naive", "ngram", "suffix", "auto"])
def test_same_tokens_whatever_drafts(gguf: Reference, method: str, num_ranks: int) -> None:
    check(gguf, method, num_ranks)


def test_same_tokens_of_a_repository(tmp_path: pathlib.Path) -> None:
    """Integers of 4 and 8 bits, e4m3, and integers whose groups are no neighbours."""
    others = {
        "layers.1.mlp": quantized_files.int_quantized(has_zeros=True),
        "v_proj": quantized_files.pack_quantized(8, 32, has_zeros=True),
        "o_proj": quantized_files.pack_quantized(4, 32, act_order=True),
        "layers.1.self_attn.o_proj": quantized_files.float8("channel", {}),
    }
    method = quantized_files.pack_quantized(4, 32, has_zeros=True)
    path, _ = quantized_files.write(tmp_path, "qwen3_moe-tiny", method, others=dict(reversed(others.items())))
    base = Config(ModelConfig(model=str(path), dtype="bfloat16"), CacheConfig())
    reference = make_reference(base, seed=3, count=8)
    for num_ranks in (1, 2):
        check(reference, "auto", num_ranks)


def test_same_tokens_of_inputs_in_the_order_of_their_groups(tmp_path: pathlib.Path) -> None:
    """Sums that ranks share out have groups that end anywhere."""
    path, _ = quantized_files.write(tmp_path, "qwen3-tiny", quantized_files.gptq(4, 32, act_order=True))
    base = Config(ModelConfig(model=str(path), dtype="bfloat16"), CacheConfig())
    reference = make_reference(base, seed=4, count=8)
    for num_ranks in (1, 2):
        check(reference, "auto", num_ranks)


def check(reference: Reference, method: str, num_ranks: int) -> None:
    """Ways take turns: between them chunks, prefix hits, preemption and batches."""
    columns = [PLAIN] if method == "naive" else standard_methods([method], [3])
    ways = quick_variants()[1:] if num_ranks == 1 else [quick_variants()[4]]
    base = reference.base if num_ranks == 1 else on_ranks(reference.base, num_ranks)
    for way in ways:
        requests = reference.requests[: way.num_requests or None]
        answers = {r.request_id: reference.answers[r.request_id] for r in requests}
        cell = run_cell(base, way, columns[0], requests, answers)
        assert (cell.difference, cell.missing) == (None, None), (way.name, method)


def test_two_engines_give_the_bytes_of_one(gguf: Reference) -> None:
    [ngram] = standard_methods(["ngram"], [3])
    with open_pair(gguf, (DECODE, ngram), (PREFILL, PLAIN), seed=1) as pair:
        answers = pair.run(ngram.apply(gguf.requests), random.Random(0))
        assert compare(gguf.answers, answers) is None
        assert pair.decode.stats().num_supplied_tokens["prefill"] > 500


def test_packed_weights_of_a_file_are_kept(gguf: Reference, tmp_path: pathlib.Path) -> None:
    way = quick_variants()[0]
    base = replace(gguf.base, model=replace(gguf.base.model, packed_weights_cache=str(tmp_path)))
    written = []
    for _ in range(2):
        cell = run_cell(base, way, PLAIN, gguf.requests, gguf.answers)
        assert (cell.difference, cell.missing) == (None, None)
        written.append([path.stat().st_mtime_ns for path in tmp_path.glob("*.packed")])
    assert written[0] == written[1] != []
