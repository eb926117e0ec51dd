"""A GGUF file is read exactly: blocks, names, configuration and tokenizer; what is not valid is refused in a line."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
import struct
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.hub.gguf import checkpoint_folder, gguf_files
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.drafters.mtp_weights import open_mtp_weights
from fastdeploy_sd.models.gguf.config import generation_config
from fastdeploy_sd.models.gguf.container import GgufFile
from fastdeploy_sd.models.gguf.tokenizer import Vocabulary, tokenizer_json
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import embedding_bytes, weight_bytes_per_step
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.models.weights.storages.registry import read_weight
from fastdeploy_sd.ops.bf16 import widen
from tests.models import gguf_files as files
from tests.models import golden
from tests.models.harness import SingleSequence
from tests.models.mtp_models import make_model

pytestmark = pytest.mark.slow

MODELS = ["llama-tiny", "qwen2-tiny", "qwen3-tiny"]
FAMILIES = [
    "deepseek_v3-tiny",
    "gemma2-tiny",
    "gemma3-tiny",
    "glm4_moe-tiny",
    "gpt_oss-tiny",
    "granite-tiny",
    "mistral-tiny",
    "ministral3-tiny",
    "phi3-tiny",
    "smollm3-tiny",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))


def texts(count: int) -> list[str]:
    """Texts of several scripts, digits, spaces and line breaks."""
    rng = random.Random(3)
    alphabets = [
        "abcdefghijklmnopqrstuvwxyzABC", " ", " \t\n\r", "0123456789", ".,;:!?'\"()[]{}<>/|@#$%^&*-_=+~`", "äöüßéñç",
        "日本語中文字", "안녕하세요", "مرحبا", "привет", "😀👍🏽🇩🇪", "\u200b\u00a0\u3000\u0301", "\u2581",
    ]  # fmt: skip
    return [
        "".join(rng.choice(rng.choice(alphabets)) * rng.choice((1, 1, 1, 3)) for _ in range(rng.randrange(40)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_the_numbers_that_the_package_reads(name: str) -> None:
    block = BLOCK_TYPES[name]
    blocks = np.random.default_rng(1).integers(0, 256, (20_000, block.num_bytes), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        np.testing.assert_array_equal(block.unpack(blocks).numbers(), want)


@pytest.mark.parametrize("model", [*MODELS, *FAMILIES])
def test_a_file_of_numbers_is_the_model_it_was_made_of(model: str, tmp_path: pathlib.Path) -> None:
    """Llama's rotary factors are float32 in the file, and Gemma's norms have their offset added."""
    folder = checkpoint_folder([files.write(tmp_path / "m.gguf", model, "F32")])
    source, original = Checkpoint(folder), Checkpoint(golden.ROOT / model)
    for name in original.names():
        if name in source:
            shape = original.shape(name)
            offset = np.float32(model.startswith("gemma") and name.endswith("norm.weight"))
            want = golden_numbers(original, name) + offset
            np.testing.assert_array_equal(source.tensor(name, shape), want, err_msg=name)
    token_ids = np.random.default_rng(0).integers(4, 4096, 40).astype(np.int32)
    got = SingleSequence(folder, "float32").logits(token_ids)
    want = SingleSequence(model, "float32").logits(token_ids)
    np.testing.assert_allclose(got, want, atol=2e-4 if model == "llama-tiny" else 0)


def golden_numbers(source: Checkpoint, name: str) -> np.ndarray:
    numbers = source.tensor(name, source.shape(name))
    return widen(numbers)


@pytest.mark.parametrize("model", MODELS)
def test_quantised_weights_keep_the_numbers_of_the_file(model: str, tmp_path: pathlib.Path) -> None:
    path = files.write(tmp_path / "m.gguf", model, {"attn_v": "Q8_0", "ffn": "Q4_1", "attn": "Q5_0", "token": "Q8_0"})
    source = Checkpoint(checkpoint_folder([path]))
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    ffn = read_weight(source, "model.layers.1.mlp.up_proj", (320, 128)).numbers().data
    np.testing.assert_array_equal(ffn, stored["blk.1.ffn_up.weight"])
    heads, want = source.config["num_attention_heads"], stored["blk.0.attn_q.weight"]
    q = read_weight(source, "model.layers.0.self_attn.q_proj", (len(want), 128))
    if model == "llama-tiny":
        want = want.reshape(heads, -1, 2, 128).swapaxes(1, 2).reshape(want.shape)
    np.testing.assert_array_equal(q.numbers().data, want)


@pytest.mark.parametrize(("model", "layout"), [("glm4_moe-tiny", "numbered"), ("qwen3_5-tiny", "qwen")])
def test_mtp_layers_are_read_too(model: str, layout: str, tmp_path: pathlib.Path) -> None:
    reference = make_model(tmp_path, model, layout)
    folders = [
        checkpoint_folder([files.write(tmp_path / f"{kind}.gguf", str(reference.path), {"conv1d": "F32", "": kind})])
        for kind in ("F32", "Q8_0")
    ]
    original, numbers, integers = (
        open_mtp_weights(Checkpoint(path), read_decoder_config(Checkpoint(path).config), None)
        for path in (reference.path, *folders)
    )
    for weights in (numbers, integers):
        assert (weights.config.num_layers, weights.num_layers) == (1, 1)
        weights.verify(3)
    for role in ("embedding_norm", "hidden_norm", "output_norm"):
        np.testing.assert_array_equal(getattr(numbers, role)(0), getattr(original, role)(0))
    np.testing.assert_array_equal(numbers.projection(0)[0].to_array(), original.projection(0)[0].to_array())
    prompts = [np.random.default_rng(i).integers(4, 4096, 20).tolist() for i in range(3)]
    answers = []
    for speculative in ({"method": "mtp", "num_speculative_tokens": 3}, "naive"):
        with LLM(str(folders[1]), num_gpu_blocks_override=64, speculative_config=speculative) as llm:
            outputs = llm.generate(
                prompt_token_ids=prompts, sampling_params=SamplingParams(temperature=0.0, max_tokens=24)
            )
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


MIXED = {
    "attn_v": "Q8_0", "attn": "Q5_0", "gate_inp": "F32", "ffn_down": "Q5_1", "ffn_gate": "Q4_0", "ffn_up": "Q5_0",
    "output": "Q8_0", "token": "Q5_0",
}  # fmt: skip


@pytest.mark.parametrize("model", ["qwen3-tiny", "qwen3_moe-tiny"])
def test_integers_of_several_types_are_multiplied(model: str, tmp_path: pathlib.Path) -> None:
    """Of gate and up, and of experts' gate_up and down; the logits are those of the numbers but for int8 inputs."""
    folder = checkpoint_folder([files.write(tmp_path / "m.gguf", model, MIXED)])
    token_ids = np.random.default_rng(0).integers(4, 4096, 40).astype(np.int32)
    own, numbers = (SingleSequence(folder, "float32", keeps_integers=kept) for kept in (True, False))
    want = numbers.logits(token_ids)
    assert np.linalg.norm(own.logits(token_ids) - want) < 0.05 * np.linalg.norm(want)
    source, scheme = Checkpoint(folder), QuantScheme.create("float32", None)
    weights = DecoderWeights(source, own.config)
    per_step = weight_bytes_per_step(own.config, scheme, weights)
    if model == "qwen3-tiny":
        assert per_step is not None
        assert own.num_packed_bytes == per_step + embedding_bytes(weights)


@pytest.mark.parametrize("model", MODELS)
def test_byte_pairs_have_the_ids_of_the_original(model: str, tmp_path: pathlib.Path) -> None:
    folder = checkpoint_folder([files.write(tmp_path / "m.gguf", model, "F16")])
    own, original = (tokenizers.Tokenizer.from_file(str(p / "tokenizer.json")) for p in (folder, golden.ROOT / model))
    for text in [*texts(2000), "<|im_start|>user\nx<|im_end|>"]:
        assert own.encode(text).ids == original.encode(text).ids, repr(text)
    want = json.loads((golden.ROOT / model / "generation_config.json").read_text())["eos_token_id"]
    assert set(want if isinstance(want, list) else [want]) <= set(Checkpoint(folder).eos_token_ids())


def test_words_of_gpt_4o_and_gpt_oss_are_cut_at_case_and_after_three_digits() -> None:
    """As o200k cuts them: 13,335 texts had the ids of tiktoken with the whole vocabulary when this was written."""
    tokens = [*"abcdefghij", "<|start|>"]
    values: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o"}
    values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 10 + [3]}
    spec = tokenizer_json(Vocabulary.read("here", values | {"tokenizer.ggml.merges": []}))
    cut = tokenizers.Tokenizer.from_str(json.dumps(spec)).pre_tokenizer.pre_tokenize_str
    for words in (
        ["Hello", "World's", " HTTPServer'RE", "x"],
        ["12", "a"],
        ["123", "45", " ", "6"],
        ["a", " //\n", "b", "/c"],
        ["x", "\n\n", " ", " y", "  "],
        ["日本", " éé\u0301x'LL"],
    ):
        text, begins = "".join(words), [0]
        for word in words:
            begins.append(begins[-1] + len(word))
        assert [span[0] for _, span in cut(text)] == begins[:-1], words


def test_the_end_of_a_message_in_a_channel_ends_no_answer() -> None:
    tokens = ["a", "<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3, 3]}
    values["tokenizer.ggml.eos_token_id"] = 1
    assert generation_config(Vocabulary.read("here", values)) == {"eos_token_id": [1, 2]}
    values["tokenizer.ggml.token_type"] = [1, 3, 3, 3, 1]  # as Phi-3's, without channels
    assert generation_config(Vocabulary.read("here", values)) == {"eos_token_id": [1, 2, 3]}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_have_the_ids_of_sentencepiece(prefix: bool, tmp_path: pathlib.Path) -> None:
    symbols = ["<mark>"] if prefix else ["<mark>", "\n\n", "\u2581\u2581\u2581"]
    corpus = tmp_path / "corpus"
    corpus.write_text("\n".join(path.read_text() for path in python_files()[:12]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=900, model_type="bpe", byte_fallback=True,
        add_dummy_prefix=prefix, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=symbols, character_coverage=0.98, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    kinds = [
        (2, model.is_unknown), (3, model.is_control), (6, model.is_byte), (5, model.is_unused),
    ]  # fmt: skip
    ids = range(model.vocab_size())
    types = [next((kind for kind, holds in kinds if holds(i)), 1) for i in ids]
    tokens = [model.id_to_piece(i) for i in ids]
    types = [4 if t in symbols else kind for t, kind in zip(tokens, types, strict=True)]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
    spec = tokenizer_json(Vocabulary.read("here", values))
    own = tokenizers.Tokenizer.from_str(json.dumps(spec))
    for text in texts(2000):
        assert own.encode(text).ids == model.encode(text), repr(text)


def python_files() -> list[pathlib.Path]:
    return sorted(pathlib.Path(__file__).parent.glob("*.py"))


def header(num_tensors: int = 0, values: bytes = b"", num_values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "readable GGUF file"),
        (b"GGML" + bytes(100), "begin with GGUF"),
        (header(version=1), "version 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "a big-endian file"),
        (header(num_values=2**60), "more bytes"),
        (header(num_tensors=2**60), "more bytes"),
        (header(0, text("k") + struct.pack("<IQ", 8, 2**62), 1), "text of at most"),
        (header(0, text("k") + struct.pack("<IIQ", 9, 0, 2**40), 1), "at most 16777216 values"),
        (header(0, text("k") + struct.pack("<IIQ", 9, 9, 1), 1), "no arrays in an array"),
        (header(0, text("k") + struct.pack("<I", 77), 1), "expected a type of 0 to 12, got 77"),
        (header(0, (text("k") + struct.pack("<IB", 0, 1)) * 2, 2), "is there twice"),
        (header(0, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1), 1), "UTF-8"),
        (header(1, tensor("t", (32,), 16, 0)) + bytes(200), "F32, F16, BF16, Q4_0.*got IQ2_XXS"),
        (header(1, tensor("t", (33,), 2, 0)) + bytes(200), "rows of a multiple of 32, got 33"),
        (header(1, tensor("t", (2**40, 2**40), 0, 0)) + bytes(200), "within the file"),
        (header(1, tensor("t", (8,), 0, 4)) + bytes(200), "aligned to 32"),
        (header(2, tensor("a", (16,), 0, 0) + tensor("b", (16,), 0, 32)) + bytes(300), "overlap"),
        (header(2, tensor("a", (8,), 0, 0) * 2) + bytes(300), "a new name"),
        (header(1, tensor("a" * 65, (8,), 0, 0)) + bytes(300), "at most 64 bytes"),
        (header(1, tensor("a", (1,) * 5, 0, 0)) + bytes(300), "1 to 4 dimensions, got 5"),
    ],
)
def test_a_damaged_container_is_refused(data: bytes, match: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match):
        GgufFile(path)


def test_the_files_of_a_model_are_found(tmp_path: pathlib.Path) -> None:
    parts = [tmp_path / f"big-{i:05}-of-00002.gguf" for i in (1, 2)]
    for path in parts:
        path.touch()
    assert gguf_files(parts[0]) == parts
    assert gguf_files(tmp_path) == parts
    parts[1].unlink()
    with pytest.raises(ConfigError, match="found no big-00002-of-00002"):
        gguf_files(parts[0])
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ConfigError, match="expected one model"):
        gguf_files(tmp_path)
    assert gguf_files(golden.ROOT / MODELS[0]) == []


def test_safetensors_of_a_folder_win_over_gguf_files(tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(golden.ROOT / MODELS[0], tmp_path / "model")
    want = Checkpoint(folder).tensors
    (folder / "other.gguf").write_bytes(b"GGUF")
    assert gguf_files(folder) == []
    assert Checkpoint(folder).tensors == want


def test_scales_that_are_no_numbers_are_refused(tmp_path: pathlib.Path) -> None:
    path = files.write(tmp_path / "m.gguf", "qwen3-tiny", {"ffn_up": "Q8_0"})
    entry = GgufFile(path).entries["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    begin = GgufFile(path).data_start + entry.begin
    data[begin : begin + 2] = np.float16("inf").tobytes()
    path.write_bytes(data)
    part = read_weight(Checkpoint(checkpoint_folder([path])), "model.layers.0.mlp.up_proj", (320, 128))
    with pytest.raises(CheckpointError, match="finite scales"):
        part.numbers()
