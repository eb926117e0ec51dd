"""The secret of a deployment: given, or made once per user."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fastdeploy_sd.config import SplitwiseConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.wire.secret import STATE_VARIABLE, deployment_secret, derive_key


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    return tmp_path / "fastdeploy_sd" / "pd_secret"


def test_a_given_secret_needs_no_file(file: Path) -> None:
    assert deployment_secret(SplitwiseConfig(pd_secret="sixteen characters")) == b"sixteen characters"
    assert not file.exists()


def test_without_one_a_file_of_the_user_is_made_once(file: Path) -> None:
    first = deployment_secret(SplitwiseConfig())
    assert deployment_secret(SplitwiseConfig()) == first == file.read_bytes()
    assert len(first) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_many_that_start_at_once_have_one_secret(file: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(deployment_secret(SplitwiseConfig()))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_file_that_others_can_read_is_refused(file: Path, mode: int) -> None:
    deployment_secret(SplitwiseConfig())
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^pd_secret: expected .*only this user.* with mode {mode:o}"):
        deployment_secret(SplitwiseConfig())


def test_links_and_other_contents_are_refused(file: Path) -> None:
    secret = deployment_secret(SplitwiseConfig())
    file.write_bytes(secret[:10])
    with pytest.raises(ConfigError, match="got another content"):
        deployment_secret(SplitwiseConfig())
    file.rename(file.parent / "elsewhere")
    file.symlink_to(file.parent / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic links"):
        deployment_secret(SplitwiseConfig())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"file/fastdeploy_sd/pd_secret .*got Not a directory"):
        deployment_secret(SplitwiseConfig())


def test_keys_of_purposes_differ() -> None:
    keys = {derive_key(secret, purpose) for secret in (b"a" * 16, b"b" * 16) for purpose in ("redis", "route")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
