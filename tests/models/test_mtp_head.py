"""The head that drafts are chosen with: a copy of the target's in fewer bits, which no token depends on."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from paddle import Tensor

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import PackedLinear
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from fastdeploy_sd.worker.loading import loaded
from fastdeploy_sd.worker.loading.draft_weights import open_draft_weights, own_scheme
from fastdeploy_sd.worker.loading.model_loading import load_model
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from tests.models.mtp_models import MtpReference, make_model
from tests.models.mtp_runs import Event, make_engine, make_requests, run

pytestmark = pytest.mark.slow

NAME = "qwen3-tiny"


def events_of(reference: MtpReference, **options: Any) -> list[Event]:
    """What an engine drafts after some texts."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(4, 4096, n).astype(np.int32) for n in (1, 33, 9, 17)]
    engine, recorder = make_engine(str(reference.path), 3, **options)
    run(engine, make_requests(prompts, 20))
    return [event for event in recorder.events if len(event.drafts) > 0]


def num_agreeing(reference: MtpReference, events: list[Event], head_format: LinearFormat) -> int:
    """How many of the events drafted what the reference does with its head stored in a format."""
    longest = {event.request_id: event.text for event in events}
    hidden = {request_id: reference.hidden(text[:-1]) for request_id, text in longest.items()}
    num_agreeing = 0
    for event in events:
        rows = hidden[event.request_id][: len(event.text) - 1]
        want = reference.drafts(event.text, len(event.drafts), rows, head_format)
        num_agreeing += np.array_equal(event.drafts, want.token_ids)
    return num_agreeing


@pytest.mark.parametrize(("layout", "head"), [("numbered", "wint8"), ("numbered", "wint4"), ("numbered-own", "wint4")])
def test_drafts_are_those_of_the_quantised_head(layout: str, head: LinearFormat, tmp_path: pathlib.Path) -> None:
    """All but few: an activation may round to the next integer. The exact head says something else far more often."""
    reference = make_model(tmp_path, NAME, layout)
    events = events_of(reference, draft_head_quantization=head)
    num_right = num_agreeing(reference, events, head)
    assert num_right > 0.9 * len(events)
    assert num_agreeing(reference, events, "float32") < num_right


def load(path: pathlib.Path, head: str, num_steps: int = 1, folder: pathlib.Path | None = None, **model: Any) -> Any:
    """The target and the draft layers, as a server has them."""
    speculative = SpeculativeConfig("mtp", num_steps, num_model_steps=num_steps, draft_head_quantization=head)  # type: ignore[arg-type]
    cache = None if folder is None else str(folder)
    config = Config(ModelConfig(str(path), packed_weights_cache=cache, **model), speculative=speculative)
    checkpoint = Checkpoint(path)
    decoder_config = read_decoder_config(checkpoint.config)
    return load_model(config, checkpoint, decoder_config, open_draft_weights(config, checkpoint, decoder_config))


@pytest.mark.parametrize(
    ("head", "num_heads", "model"),
    [
        ("target", 1, {}), ("wint8", 1, {"quantization": "wint8"}), ("wint8", 1, {"quantization": "wint4"}),
        ("auto", 2, {}), ("auto", 2, {"dtype": "float32"}), ("auto", 2, {"quantization": "wint8"}),
        ("auto", 2, {"quantization": "wint4"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_targets_head_is_read_where_it_has_the_format_and_one_copy_elsewhere(
    num_layers: int,
    head: str,
    num_heads: int,
    model: dict[str, Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[str] = []
    sound = WeightPacker.linear

    def linear(
        self: WeightPacker, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE
    ) -> PackedLinear[Tensor]:
        packed.append(matrix.name)
        return sound(self, matrix, fmt, slices)

    monkeypatch.setattr(WeightPacker, "linear", linear)
    load(make_model(tmp_path, NAME, "numbered", num_layers).path, head, num_layers, **model)
    assert len([name for name in packed if "embed_tokens" in name or "lm_head" in name]) == num_heads


def test_the_copy_is_kept_with_the_targets_matrices(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next start maps it like them."""
    added: list[str] = []
    sound = PackedMatrices.add

    def add(self: PackedMatrices, name: str, data: Bytes) -> None:
        added.append(name)
        sound(self, name, data)

    monkeypatch.setattr(PackedMatrices, "add", add)
    path = make_model(tmp_path, NAME, "numbered").path
    load(path, "auto", folder=tmp_path / "packed", quantization="wint8")
    assert len([name for name in added if "embed_tokens" in name or "lm_head" in name]) == 2
    added.clear()
    load(path, "auto", folder=tmp_path / "packed", quantization="wint8")
    assert added == []


@pytest.mark.parametrize(
    ("asked", "model", "linear", "experts"),
    [
        (None, {}, "wint8", "wint8"),
        (None, {"quantization": "wint8"}, "wint8", "wint8"),
        (None, {"quantization": "wint4"}, "wint4", "wint4"),
        ("none", {"quantization": "wint4"}, "bfloat16", "bfloat16"),
        ("none", {"dtype": "float32"}, "float32", "float32"),
        ("wint4", {}, "wint4", "wint4"),
    ],
)
def test_layers_are_stored_as_the_model_is_and_in_eight_bits_where_that_is_unquantised(
    asked: Any, model: dict[str, Any], linear: LinearFormat, experts: LinearFormat
) -> None:
    config = Config(ModelConfig("demo", **model), speculative=SpeculativeConfig("mtp", 1, quantization=asked))
    scheme = own_scheme(config)
    assert (scheme.linear, scheme.experts) == (linear, experts)


@pytest.mark.parametrize(("drafts", "formats"), [(False, ["bfloat16"]), (True, ["bfloat16", "wint4", "wint8"])])
def test_products_of_draft_layers_are_tuned_as_the_targets_are(
    drafts: bool, formats: list[LinearFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[LinearFormat] = []
    monkeypatch.setattr(loaded, "tune_linear", lambda found, *_, **__: tuned.extend(found))
    config = Config(ModelConfig("demo"), speculative=SpeculativeConfig("mtp", 1))
    loaded._tune_linear(config, RankGroup(), 1, drafts=drafts)
    assert tuned == formats
