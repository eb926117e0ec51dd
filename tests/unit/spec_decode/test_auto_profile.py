"""The file of measured costs: what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control import profile as auto_profile
from fastdeploy_sd.spec_decode.control.profile import CostProfile, DraftSample, StepSample, profile_name

PROFILE = CostProfile(
    machine={"cpu": "x", "num_threads": 2},
    model={"fingerprint": "f"},
    steps=(StepSample(64, 0, 0, 9.5), StepSample(1, 1, 64, 0.25), StepSample(4, 1, 64, 0.5)),
    drafts=(DraftSample("mtp", 1, 3, 64, 0.36),),
)


def write(path: Path, **changes: Any) -> Path:
    """The file of PROFILE with some values replaced."""
    PROFILE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    PROFILE.save(path)
    assert CostProfile.load(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]
    assert json.loads(path.read_text())["drafts"] == [
        {"method": "mtp", "requests": 1, "drafts": 3, "context": 64, "ms": 0.36}
    ]
    assert f'"version": {json.loads(path.read_text())["version"]},' in str(auto_profile.__doc__)
    with pytest.raises(FileNotFoundError):
        CostProfile.load(tmp_path / "other.json")


def test_it_fits_where_it_was_measured() -> None:
    assert PROFILE.fits({"num_threads": 2, "cpu": "x"}, {"fingerprint": "f"})
    assert not PROFILE.fits({"num_threads": 1, "cpu": "x"}, {"fingerprint": "f"})
    assert not PROFILE.fits({"num_threads": 2, "cpu": "x"}, {"fingerprint": "g"})
    names = {profile_name({"num_threads": n}, {"fingerprint": f}) for n in (1, 2) for f in "fg"}
    assert len(names) == 4
    assert profile_name({"a": 1, "b": 2}, {}) == profile_name({"b": 2, "a": 1}, {})


STEP = {"rows": 1, "requests": 1, "context": 0, "ms": 0.5}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 1}, "version: expected 5, got 1"),
        ({"version": True}, "version: expected 5, got True"),
        ({"more": 1}, "the file: expected an object of version, machine, model, steps, drafts, got ['drafts', 'm"),
        ({"machine": {"cpu": 1.5}}, "machine: expected an object of texts and integers, got {'cpu': 1.5}"),
        ({"model": []}, "model: expected an object of texts and integers, got []"),
        ({"steps": {}}, "steps: expected a list, got dict"),
        ({"steps": []}, "steps: expected one of one row of one request, got none"),
        ({"steps": [STEP, STEP | {"rows": 0}]}, "steps[1].rows: expected an integer of at least 1, got 0"),
        ({"steps": [STEP | {"rows": True}]}, "steps[0].rows: expected an integer of at least 1, got True"),
        ({"steps": [STEP | {"context": -1}]}, "steps[0].context: expected an integer of at least 0, got -1"),
        ({"steps": [STEP | {"ms": 0}]}, "steps[0].ms: expected a positive number, got 0"),
        ({"steps": [STEP | {"ms": float("nan")}]}, "steps[0].ms: expected a positive number, got nan"),
        ({"drafts": [STEP]}, "drafts[0]: expected an object of method, requests, drafts, context, ms, got ['con"),
        (
            {"drafts": [{"method": 3, "requests": 1, "drafts": 1, "context": 0, "ms": 1}]},
            "drafts[0].method: expected a text, got 3",
        ),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write(tmp_path / "costs.json", **changes)
    with pytest.raises(ConfigError) as caught:
        CostProfile.load(path)
    assert caught.value.message.startswith(f"profile: {path}: {text}")


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text in ("{", "[" * 100_000, "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"profile: expected a readable JSON file, got .*costs.json"):
            CostProfile.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="expected a readable JSON file"):
        CostProfile.load(path)
