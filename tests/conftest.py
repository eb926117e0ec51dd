"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_sd.device import library

# Each takes up to 3 GB of memory with the servers it starts.
MAX_PROCESSES = 8
GOLDEN_DIR = Path(__file__).resolve().parent / "golden"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the tiny checkpoints, one per architecture, in Hugging Face layout."""
    return GOLDEN_DIR


@pytest.fixture(scope="session", autouse=True)
def one_kernel_thread() -> None:
    """Threads of the tests' own process that wait for the next op spin, on cores that tests beside this one could use.

    What is no different with several is shown where a test asks for them: every op, and every model with every method.
    """
    library.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def hangup_ends_processes() -> None:
    """What tests start would inherit that SIGHUP is ignored, as under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# What takes a minute or more: begun last, it would leave the other processes without work.
LONG = ("tests/ops/test_cuda_build.py", "tests/fuzz/test_soak.py", "tests/clients/", "tests/engine/test_gpu")
# What `--fast` leaves out: tests that start processes, compile, fuzz or go over a whole matrix, ...
SLOW = (
    "tests/benchmarks/test_compare.py",
    "tests/benchmarks/test_gpu_kernels.py",
    "tests/benchmarks/test_peers_report.py",
    "tests/benchmarks/test_peers_run.py",
    "tests/benchmarks/test_peers_servers.py",
    "tests/benchmarks/test_speculation.py",
    "tests/clients/",
    "tests/conformance/",
    "tests/e2e/",
    "tests/engine/",
    "tests/fuzz/",
    "tests/models/",
    "tests/ops/test_arena.py",
    "tests/ops/test_attention_int8.py",
    "tests/ops/test_collectives.py::test_sums_are_those_of_the_tree_on_every_rank",
    "tests/ops/test_cuda",  # all of the emulated GPU
    "tests/ops/test_operators.py",
    "tests/ops/test_row_invariance_attention.py",
    "tests/ops/test_tile_instructions.py",
    "tests/server/",
    "tests/splitwise/",
    "tests/test_architecture.py",  # part of `scripts/dev check`
    "tests/unit/engine/test_engine_properties.py",
    "tests/unit/engine/test_step_pipeline.py::test_any_number_of_right_drafts_gives_the_plain_tokens",
    "tests/unit/engine/test_step_pipeline.py::test_any_schedule_gives_the_plain_tokens",
    "tests/unit/text/test_hostile_template.py",
    "tests/unit/text/test_hostile_tokenizer.py",
    "tests/unit/entrypoints/test_openapi.py::test_a_value_is_taken_exactly_where_the_schema_allows_it",
    "tests/unit/entrypoints/test_preparer.py",
    "tests/unit/entrypoints/test_request_bodies.py::test_a_million_wrong_entries_are_one_fault",
    "tests/unit/text/test_sentencepiece.py::test_damaged_models_are_refused_or_served",
    "tests/unit/entrypoints/test_step_sizes.py",
    "tests/unit/entrypoints/test_worker_pool.py",
    "tests/unit/text/guidance/test_reasoning_grammar.py::test_rolled_back_a_matcher_is_as_if_it_had_not_gone_on",
    "tests/unit/engine/ipc/test_engine_process.py",
    "tests/unit/process/test_forked.py",
    "tests/unit/distributed/",
    "tests/unit/cluster/redis/",
    "tests/unit/spec_decode/verification/test_joint_law.py",
    "tests/unit/spec_decode/test_ngram.py::test_random_steps_follow_the_definition",
    "tests/unit/spec_decode/test_prediction.py::test_follows_as_the_definition_does",
    "tests/unit/spec_decode/test_suffix_reference.py",
    "tests/unit/cli/test_cli.py",
)
# ... and what of that stays: logits of every architecture, every method equal to plain decoding, a real server.
FAST = (
    "tests/engine/test_exactness.py::test_the_promise_holds_at_every_isa_level",
    "tests/models/test_golden.py",
    "tests/models/test_mtp_weights.py",
    "tests/server/test_api.py::test_many_requests_at_once_get_what_they_get_alone",
    "tests/server/test_api_e2e.py::test_greedy_completions_are_the_reference",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what takes long, as tests/conftest.py says")


def pytest_configure(config: pytest.Config) -> None:
    """Only the order is random: a test seeds its own generators, and none may lean on a global one."""
    if config.pluginmanager.hasplugin("randomly"):
        config.option.randomly_reset_seed = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process per usable core and one more for all tests, as many wait for servers a third of their time.

    None for chosen files, which are done before processes have started.
    """
    are_chosen = config.args_source is pytest.Config.ArgsSource.ARGS
    return 0 if are_chosen else min(len(os.sched_getaffinity(0)) + 1, MAX_PROCESSES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which nothing stays are not even imported."""
    name = collection_path.relative_to(config.rootpath).as_posix() + ("/" if collection_path.is_dir() else "")
    stays = any(test.startswith(name) or name.startswith(test) for test in FAST)
    return True if config.getoption("fast") and name.startswith(SLOW) and not stays else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first; what `--fast` leaves out is left out.

    Ops are tested fast in one way: on NumPy arrays, at this machine's best instruction-set level.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))  # the order within is as it was
    if not config.getoption("fast"):
        return
    other_ways = {*library.ISA_LEVELS, "paddle"} - {library.isa()}

    def is_slow(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        values = () if callspec is None else callspec.params.values()
        in_another_way = any(isinstance(value, str) and value in other_ways for value in values)
        return in_another_way or (item.nodeid.startswith(SLOW) and not item.nodeid.startswith(FAST))

    left_out = [item for item in items if is_slow(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_slow(item)]


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
