"""The trained models that `scripts/dev test --real NAME...` names; without names no test of this folder runs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.real_models import SOURCES, fetch

NAMES = os.environ.get("REAL_MODELS", "").split()
collect_ignore_glob = [] if NAMES else ["test_*.py"]
REFERENCES = Path(__file__).parent / "references"
# Without a chat template: their texts go on from the prompt itself.
BASE_MODELS = {"gemma3-270m"}


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file, and what an independent float32 computation of its weights gave.

    Attributes:
        texts: chats, or plain texts of a base model, with `prompt`, `prompt_ids`, `token_ids` (greedy, at most 160) and
            `gaps`: how far the two largest logits were apart at each.
    """

    name: str
    path: Path
    texts: list[dict[str, Any]]

    @property
    def is_chat(self) -> bool:
        return self.name not in BASE_MODELS


@pytest.fixture(scope="session", params=NAMES)
def real_model(request: pytest.FixtureRequest) -> RealModel:
    name: str = request.param
    return RealModel(name, fetch(SOURCES[name]), json.loads((REFERENCES / f"{name}.json").read_text()))
