"""The promise where experts are spread over hosts, which are loopback addresses: the bytes of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, compare, run_cell
from fastdeploy_sd.cli.verify.runs import Reference, engine_config
from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.distributed.expert_process import shared_experts
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.process.child import ChildProcess
from tests.doubles.ports import free_port
from tests.engine.models import References, fitted
from tests.engine.test_expert_parallel import (
    WAY,
    answers_of,
    experts_of,
    guided,  # noqa: F401 (a fixture)
    method_of,
    random_moves,
    start,
)
from tests.server.node_process import IPS, SECRET, on_nodes, second_node_of

pytestmark = pytest.mark.slow

NUM_REQUESTS = 12


@contextlib.contextmanager
def open_hosts(
    base: Config,
    way: EngineVariant,
    method: Method,
    num_engines: int,
    *,
    of_one_command: bool = True,
    eplb: EplbConfig | None = None,
) -> Iterator[tuple[list[Engine], list[ChildProcess]]]:
    """Load engines in this process, as two hosts or as one command each would, and the processes that carry rows."""
    parallel = ParallelConfig(
        data_parallel_size=num_engines,
        enable_expert_parallel=True,
        enable_eplb=eplb is not None,
        eplb_config=eplb,
        rank_timeout_s=60.0,
        ips=IPS if of_one_command else (),
        node_port=free_port(),
    )
    base = engine_config(replace(base, parallel=parallel), way, method)
    base = replace(base, splitwise=replace(base.splitwise, pd_secret=SECRET))

    if of_one_command:
        places = [replace(parallel, node_rank=host) for host in range(len(IPS))]
    else:
        places = [replace(parallel, local_data_parallel_id=number) for number in range(num_engines)]
    commands = [replace(base, parallel=place) for place in places]
    num_threads = library.num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(library.set_num_threads, num_threads)
        engines, bridges = [], []
        for command in commands:
            file, bridge = stack.enter_context(shared_experts(command))
            assert file is not None
            assert bridge is not None
            bridges.append(bridge)
            own = command.parallel
            for number in range(own.first_engine, own.first_engine + own.num_local_engines):
                config = replace(command, parallel=replace(own, local_data_parallel_id=number))
                executor = start(config, method, file)
                stack.callback(executor.shutdown)
                engines.append(Engine(config, executor))
        for engine in engines:
            experts_of(engine).wait_until_all_serve(60)
        yield engines, bridges


@pytest.mark.parametrize(
    ("model", "num_engines", "method", "of_one_command"),
    [
        ("ernie4_5_moe-tiny", 2, "auto-mtp", True),
        ("seven experts", 4, "naive", True),
        ("seven experts", 3, "mtp-ngram", False),
    ],
)
def test_same_tokens_of_engines_of_several_hosts(
    guided: Callable[[str], Reference],  # noqa: F811
    model: str,
    num_engines: int,
    method: str,
    of_one_command: bool,
) -> None:
    reference, column = guided(model), method_of(method)
    with open_hosts(reference.base, fitted(WAY, model), column, num_engines, of_one_command=of_one_command) as opened:
        engines, _ = opened
        requests = reference.requests[:NUM_REQUESTS]
        answers = answers_of(engines, column.apply(requests))
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, answers) is None
        for engine in (engines[0], engines[-1]):
            assert experts_of(engine).states() == ("serving",) * num_engines


def test_same_tokens_while_experts_move_between_hosts(guided: Callable[[str], Reference]) -> None:  # noqa: F811
    """The first host says where they shall be."""
    reference, method = guided("seven experts"), method_of("naive")
    with open_hosts(
        reference.base, fitted(WAY, "seven experts"), method, 2, eplb=EplbConfig(redundant_experts_num=1)
    ) as (engines, _):
        move, seen = random_moves(experts_of(engines[0]), 1)
        requests = reference.requests[:NUM_REQUESTS]
        answers = answers_of(engines, requests, between=move)
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, answers) is None
        assert len(seen) > 3


def test_same_tokens_of_ranks_of_several_hosts(references: References) -> None:
    model = "ernie4_5_moe-tiny"
    reference, column = references.get(model), method_of("mtp-ngram")
    requests = reference.requests[:NUM_REQUESTS]
    answers = {r.request_id: reference.answers[r.request_id] for r in requests}
    base = on_nodes(reference.base, size=2)
    base = replace(base, parallel=replace(base.parallel, enable_expert_parallel=True))
    way = fitted(WAY, model)
    with second_node_of(engine_config(base, way, column)):
        cell = run_cell(base, way, column, requests, answers)
    assert (cell.difference, cell.missing) == (None, None)
