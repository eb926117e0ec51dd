from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.gpu import gpu_device
from tests.engine.models import References
from tests.ops.cuda_device import EMULATED, GPU, emulated_chip


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=[EMULATED, pytest.param(GPU, marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which GPU `device gpu` is while the tests of a module run."""
    with gpu_device(request.param):
        yield request.param


@pytest.fixture
def small_chip(kind: str) -> Iterator[None]:
    """Emulate a chip whose products have 16 rows and not 64, which takes half the time: for what is no kernel's."""
    with emulated_chip(kind, 86):
        yield
