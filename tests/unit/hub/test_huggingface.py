"""Models by name: the real package against a hub on a local port."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from fastdeploy_sd.config import Config, config_from_kwargs
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub import located
from fastdeploy_sd.hub.selection import WantedModel
from tests.doubles.hub_server import COMMIT, OLDER_COMMIT, Hub, running_hub
from tests.models import gguf_files

NAME = "some/model"
WEIGHTS = {"model-1.safetensors": b"a" * 3000, "model-2.safetensors": b"b" * 2000}
INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}).encode()
CHECKPOINT = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "tokenizer.json": b"{  }",
    "chat_template.jinja": b"x",
    "model.safetensors.index.json": INDEX,
    **WEIGHTS,
    "mtp/config.json": b"{   }",
    "mtp/model.safetensors": b"c" * 10,
}
OTHERS = {
    "pytorch_model.bin": b"pickle",
    "modeling_some.py": b"code",
    "README.md": b"words",
    "consolidated.safetensors": b"again",
    "original/model.safetensors": b"another form",
    "model.gguf": b"GGUF",
    "tokenizer.py": b"code",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub({NAME: CHECKPOINT | OTHERS}) as hub:
        # What HF_ENDPOINT and HF_HUB_CACHE come to when the package is imported.
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield hub


def find(name: str = NAME, **options: object) -> Config:
    return located(config_from_kwargs(model=name, **options))


def refusal(name: str = NAME, **options: object) -> str:
    with pytest.raises(ConfigError) as told:
        find(name, **options)
    return told.value.message


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_only_what_a_checkpoint_is_made_of_is_fetched(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastdeploy_sd")
    config = find()
    assert content(config.model.path) == CHECKPOINT
    assert sorted(hub.fetched()) == sorted(CHECKPOINT)
    assert (config.model.path.name, config.model.served_names) == (COMMIT, (NAME,))
    assert config.origins["model"] == f"{NAME}, keyword argument"
    assert f"fetching {NAME} at {COMMIT}: {len(CHECKPOINT)} files" in caplog.text


def test_what_has_been_fetched_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    first = find(download_dir=str(tmp_path / "mine"), served_model_name="mine")
    assert first.model.served_names == ("mine",)
    assert first.model.path.is_relative_to(tmp_path / "mine")
    hub.asked.clear()
    assert find(download_dir=str(tmp_path / "mine")).model.path == first.model.path
    assert hub.fetched() == []
    assert hub.asked, "a branch is asked for anew"
    hub.asked.clear()
    assert find(download_dir=str(tmp_path / "mine"), revision=COMMIT).model.path == first.model.path
    assert hub.asked == [], "a commit is not"


@pytest.mark.parametrize("revision", ["v1", OLDER_COMMIT])
def test_a_revision_is_a_tag_or_a_commit(hub: Hub, revision: str) -> None:
    assert find(revision=revision).model.path.name == OLDER_COMMIT
    assert find(revision="master").model.path.name == COMMIT, "FastDeploy's word for the default"
    hub.asked.clear()
    assert find(revision=revision, offline=True).model.path.name == OLDER_COMMIT
    assert hub.asked == []


def test_a_download_that_is_cut_goes_on_where_it_was(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is written at once
    hub.cuts["model-1.safetensors"] = 1234
    assert content(find().model.path) == CHECKPOINT
    ranges = [r for method, path, r in hub.asked if method == "GET" and path.endswith("model-1.safetensors")]
    assert ranges == ["", "bytes=1000-"]


def test_a_start_that_broke_off_keeps_whole_files(hub: Hub) -> None:
    """The hub fails while a model is fetched: whatever was whole is there at the next start."""
    files = hub.files[NAME]
    hub.files[NAME] = {name: data for name, data in files.items() if name != "mtp/model.safetensors"}
    find()
    hub.files[NAME] = files
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    (cache / "models--some--model" / "snapshots" / COMMIT / "model-1.safetensors").resolve().unlink()
    (cache / "models--some--model" / "snapshots" / COMMIT / "model-1.safetensors").unlink()
    told = refusal(offline=True)
    assert told.startswith(f"model: '{NAME}' is in {cache} without model-1.safetensors, and nothing is fetched now")
    hub.asked.clear()
    assert content(find().model.path)["model-1.safetensors"] == WEIGHTS["model-1.safetensors"]
    assert "model-1.safetensors" in hub.fetched()
    assert "model-2.safetensors" not in hub.fetched()


def test_without_a_hub_the_cache_serves(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    told = refusal(offline=True)
    assert told.startswith(
        f"model: '{NAME}' is not in {huggingface_hub.constants.HF_HUB_CACHE}, and nothing is fetched"
    )
    hub.is_broken = True
    told = refusal()
    assert told.startswith(f"model: {hub.url} cannot be reached (HfHubHTTPError: ")
    assert "check the network, HF_ENDPOINT and the proxy's variables, or give a directory" in told
    hub.is_broken = False
    folder = find().model.path
    hub.is_broken = True
    assert find().model.path == folder
    assert "cannot be reached" in caplog.text
    assert find(offline=True).model.path == folder


def test_hf_hub_offline_means_the_same(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "and nothing is fetched now (offline, HF_HUB_OFFLINE," in refusal()
    assert hub.asked == []


def test_what_the_hub_refuses_says_what_to_do(hub: Hub) -> None:
    hub.refusals["some/gated"] = (403, "GatedRepo")
    hub.files["some/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.files["some/half"] = {"config.json": b"{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": b"a"}
    hub.files["some/index"] = {"config.json": b"{}", "model.safetensors.index.json": b"{}", "model-1.safetensors": b"a"}
    wrong_revision = f"revision: expected a branch, tag or commit of {NAME}, got 'v2' (see {hub.url}/{NAME})"
    assert refusal(revision="v2") == wrong_revision
    not_there = (
        f"model: expected a directory, or the name of a model at {hub.url}, got 'some/other', which is not there"
    )
    assert refusal("some/other").startswith(not_there)
    assert refusal("some/gated").startswith("model: 'some/gated' is open to who has accepted its terms: do so at")
    assert refusal("some/pickles").startswith(
        "model: expected a repository with safetensors or GGUF files, got 'some/pickles'"
    )
    assert refusal("some/half").endswith("got 'some/half' without model-2.safetensors")
    assert "weight_map: expected an object of file names" in refusal("some/index")
    assert not any(name.endswith((".bin", ".py")) for name in hub.fetched())


def test_a_directory_wins_over_a_name(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert "expected a checkpoint directory with config.json" in refusal()
    (tmp_path / NAME / "config.json").write_text("{}")
    config = find()
    assert (config.model.model, config.model.served_names) == (NAME, (NAME,))
    assert refusal(revision="v1").startswith(
        f"revision: expected none, as the model is a directory ('{NAME}'), got 'v1'"
    )
    assert find(revision="master").model.path == Path(NAME)
    assert hub.asked == []


def test_weights_of_one_form_only_are_taken_whatever_they_are_called(hub: Hub) -> None:
    hub.files["some/mistral"] = {"config.json": b"{}", "consolidated.safetensors": b"x"}
    assert sorted(content(find("some/mistral").model.path)) == ["config.json", "consolidated.safetensors"]


GGUF = "some/model-GGUF"
GGUF_FILES = [
    "README.md",
    "mmproj-F16.gguf",
    "model-Q4_0.gguf",
    "model-q4_k_m.gguf",
    "model-UD-Q4_K_M.gguf",
    *(f"Q8_0/model-Q8_0-{part:05}-of-00002.gguf" for part in (1, 2)),
]


@pytest.mark.parametrize(
    ("gguf_type", "files"),
    [
        (None, ["model-q4_k_m.gguf"]),
        ("Q4_K_M", ["model-q4_k_m.gguf"]),
        ("UD-Q4_K_M", ["model-UD-Q4_K_M.gguf"]),
        ("q8_0", GGUF_FILES[-2:]),
    ],
)
def test_a_gguf_repository_is_taken_by_type(gguf_type: str | None, files: list[str]) -> None:
    wanted = WantedModel(GGUF, gguf_type, None, None, is_offline=False)
    assert wanted.select_files(GGUF_FILES) == files
    if gguf_type is None:
        both = [*GGUF_FILES, "config.json", "model.safetensors"]
        assert wanted.select_files(both) == ["config.json", "model.safetensors"]


def test_several_models_of_a_type_are_refused() -> None:
    wanted = WantedModel(GGUF, None, None, None, is_offline=False)
    with pytest.raises(ConfigError, match="found a-7b-Q4_K_M, b-7b-Q4_K_M; give the type"):
        wanted.select_files(["a-7b-Q4_K_M.gguf", "b-7b-Q4_K_M.gguf"])
    with pytest.raises(ConfigError, match="found a-Q2_K, a-Q8_0; give the type"):
        wanted.select_files(["a-Q8_0.gguf", "a-Q2_K.gguf"])


def test_a_gguf_model_is_fetched_once_and_read_from_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "own"))
    content = gguf_files.write(tmp_path / "m.gguf", "llama-tiny", "Q8_0").read_bytes()
    hub.files[GGUF] = {"model-Q8_0.gguf": content, "model-Q4_0.gguf": b"GGUF", "config.json": b"{}"}
    config = find(f"{GGUF}:Q8_0")
    assert hub.fetched() == ["model-Q8_0.gguf"]
    assert config.model.served_names == (f"{GGUF}:Q8_0",)
    assert json.loads((config.model.path / "config.json").read_text())["model_type"] == "llama"
    assert (config.model.path / "model-Q8_0.gguf").read_bytes() == content
    told = refusal(f"{GGUF}:Q5_K_M")
    assert "with GGUF files of type Q5_K_M, got" in told
    assert told.endswith("; it has model-Q4_0.gguf, model-Q8_0.gguf")
    hub.is_broken = True
    assert find(f"{GGUF}:Q8_0", offline=True).model.path == config.model.path
    assert "is in" in (told := refusal(f"{GGUF}:Q4_0", offline=True))
    assert "without *Q4_0.gguf" in told
