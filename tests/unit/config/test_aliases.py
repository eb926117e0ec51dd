"""Names that other servers have for options."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import load_config
from fastdeploy_sd.config.aliases import OTHER_MEANING, SAME_MEANING
from fastdeploy_sd.config.catalogue import KNOWN_NAMES
from fastdeploy_sd.config.no_effect import NO_EFFECT
from fastdeploy_sd.config.unsupported import UNSUPPORTED
from fastdeploy_sd.errors import ConfigError


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-m {m} -t 3 --alias x -np 4", "--model {m} --num-threads 3 --served-model-name x --max-num-seqs 4"),
        ("{m} -tp 1 -q wint8", "--model {m} --quantization wint8"),
        ("--model-path {m} --context-length 64", "--model {m} --max-model-len 64"),
    ],
)
def test_names_of_the_same_meaning_are_understood(model: str, theirs: str, ours: str) -> None:
    config = load_config(theirs.format(m=model).split())
    assert config == load_config(ours.format(m=model).split())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "--ctx-size 4096",
            "ctx_size: unknown option (of llama.cpp; here: max_model_len for one request, kv_cache_memory_gb for the"
            " cache of all) (command line)",
        ),
        (
            "-ngl 99",
            "ngl: unknown option (of llama.cpp; here: device: all layers are on a GPU, or none) (command line)",
        ),
        (
            "--lora-dtype auto --port 1",
            "lora_dtype: unknown option (of vLLM; here: nothing: adapters have the model's dtype) (command line)",
        ),
    ],
)
def test_other_names_are_refused_with_what_to_use(model: str, flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message == text


def test_no_name_has_two_meanings() -> None:
    known = {*KNOWN_NAMES, *UNSUPPORTED, *NO_EFFECT}
    assert known.isdisjoint(SAME_MEANING)
    assert known.isdisjoint(OTHER_MEANING)
    assert SAME_MEANING.keys().isdisjoint(OTHER_MEANING)
    assert {foreign.here for foreign in SAME_MEANING.values()} <= known
