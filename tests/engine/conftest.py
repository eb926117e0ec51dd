from __future__ import annotations

import pytest

from tests.engine.models import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("models"))
