"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import hypothesis
import pytest
from httpx._transports import default as httpx_transports

from fastdeploy_sd.device import library
from fastdeploy_sd.worker.autotune import speed_limits

# Each takes up to 3 GB of memory with the servers it starts.
MAX_PROCESSES = 8
# No test depends on how fast the machine is. Without `explain` no trace function slows every line down; with one
# Python 3.11 has hung in a test.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")
GOLDEN_DIR = Path(__file__).resolve().parent / "golden"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the tiny checkpoints, one per architecture, in Hugging Face layout."""
    return GOLDEN_DIR


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """For each request httpx would read the system's certificates: nine tenths of what one to a test's server costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx_transports, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_kernel_thread() -> None:
    """Threads of the tests' own process that wait for the next op spin, on cores that other tests could use.

    What is no different with several is shown where a test asks for them: every op, and every model with every method.
    """
    library.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def short_speed_measurements() -> None:
    """An engine reads 128 MiB when it starts, for a line in the log; the engines of these tests, thousands, read 1."""
    speed_limits.STREAM_BYTES = 1 << 20


@pytest.fixture(scope="session", autouse=True)
def hangup_ends_processes() -> None:
    """What tests start would inherit that SIGHUP is ignored, as under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# A module that is slow as a whole: `--fast` does not even import it, unless some of its tests are marked fast.
_SLOW_MODULE = re.compile(r"^pytestmark = .*pytest\.mark\.(slow|long)\b", re.MULTILINE)
_FAST_TEST = "@pytest.mark.fast\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out tests marked slow or long")


def pytest_configure(config: pytest.Config) -> None:
    """Only the order is random: a test seeds its own generators, and none may lean on a global one."""
    if config.pluginmanager.hasplugin("randomly"):
        config.option.randomly_reset_seed = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process per usable core, and one more for all tests, as many wait for servers a third of their time.

    None for chosen files, which are done before processes have started.
    """
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    num_cores = len(os.sched_getaffinity(0))
    return min(num_cores if config.getoption("fast") else num_cores + 1, MAX_PROCESSES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules without a test of the fast tier: importing them takes seconds."""
    if not config.getoption("fast") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if _SLOW_MODULE.search(text) and _FAST_TEST not in text else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--fast` leaves out; each process begins with its share of what takes long.

    The fast tier runs ops in one way: on NumPy arrays, at this machine's best instruction-set level.
    """
    if not config.getoption("fast"):
        num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
        is_long = [item.get_closest_marker("long") is not None for item in items]
        items[:] = [items[i] for i in begun_with(is_long, num_processes)]
        return
    other_ways = {*library.ISA_LEVELS, "paddle"} - {library.isa()}

    def is_slow(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        values = () if callspec is None else callspec.params.values()
        in_another_way = any(isinstance(value, str) and value in other_ways for value in values)
        is_marked = any(item.get_closest_marker(name) for name in ("slow", "long"))
        return in_another_way or (is_marked and not item.get_closest_marker("fast"))

    left_out = [item for item in items if is_slow(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_slow(item)]


def begun_with(is_first: Sequence[bool], num_parts: int) -> list[int]:
    """Order items so that each part of the list begins with its share of those that come first.

    xdist's `worksteal` gives every process an equal part in order, and takes from a part's end what others run.
    """
    first = [i for i, value in enumerate(is_first) if value]
    others = [i for i, value in enumerate(is_first) if not value]
    order: list[int] = []
    for num_left in range(num_parts, 0, -1):
        size, num_first = (len(first) + len(others)) // num_left, -(-len(first) // num_left)
        num_others = max(size - num_first, 0)
        order += first[:num_first] + others[:num_others]
        del first[:num_first], others[:num_others]
    return order


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no collection of garbage during the tests need go through it."""
    gc.collect()
    gc.freeze()


class _Errors(logging.Handler):
    """What was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


@pytest.fixture
def expects_step_failures() -> None:
    """A test that asks for this makes steps fail."""


@pytest.fixture(autouse=True)
def no_step_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """A step or a drafting method that fails costs a request, or only its drafts: a test must not pass over that."""
    handler = _Errors()
    loggers = [logging.getLogger(f"fastdeploy_sd.{name}") for name in ("worker.runner", "spec_decode.draft_guard")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert not handler.texts or "expects_step_failures" in request.fixturenames
