"""The pages about options, and --help, say what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fastdeploy_sd.config import load_config
from fastdeploy_sd.config.catalogue import OPTIONS
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS

ROOT = Path(__file__).resolve().parents[3]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_option_tables_are_current() -> None:
    config_docs = _script("config_docs")
    for name in config_docs.TABLES:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert config_docs.with_tables(name) == page, f"{name}: run scripts/dev fmt"


@pytest.mark.slow
def test_the_picture_of_the_packages_is_current() -> None:
    assert _script("package_graph").is_current(), "run scripts/package_graph.py"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [opt.name for opt in OPTIONS if opt.flag not in text] == []


def test_help_shows_choices_and_the_keys_of_speculative_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    text = capsys.readouterr().out
    for choices in ("{fair,fcfs,priority}", "{none,wint8,wint4,fp8,JSON}", "{16,32,64,128,256}", "{auto,int8,fp8}"):
        assert choices in text
    assert [key for key in SPECULATIVE_KEYS if f"  {key}: " not in text] == []
