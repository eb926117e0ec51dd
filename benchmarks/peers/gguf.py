"""`peers gguf`: this server and llama.cpp on the same GGUF file over HTTP, in turns, on problems of HumanEval."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import Progress, markdown_table
from benchmarks.hardware import describe_hardware
from benchmarks.load_client import Load
from benchmarks.peers import launch
from benchmarks.peers.catalogue import OURS
from benchmarks.peers.machine import Machine, state_line
from benchmarks.peers.over_http import Server
from benchmarks.peers.process import Turns
from benchmarks.peers.protocol import Settings, TokenIds
from benchmarks.peers.results import Case, speed_ratios
from benchmarks.peers.run import LOGS
from benchmarks.record import Record
from scripts.real_models import HUMAN_EVAL, fetch

LLAMACPP = "llamacpp"
# Way of drafting in the table -> what is added to a request. With a salt of its own, neither finds what the other left:
# prefixes with their KV, and answers to draft from.
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"cache_salt": "auto"},
    "plain": {"cache_salt": "plain", "speculation": {"enabled": False}},
}
PROMPT = "prompt"
_TASK = "Complete the following Python function. Answer with the whole function in one Python code block."
_MAX_LEN = 2048


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """Sizes of a run.

    Attributes:
        requests: requests in flight -> how many are sent in a turn.
        prompt_len: tokens of the prompt whose computation is timed.
    """

    requests: Mapping[int, int]
    output_len: int = 128
    prompt_len: int = 1024
    rounds: int = 3

    @property
    def tokens(self) -> dict[str, int]:
        """Column of the table -> tokens in a turn."""
        return {PROMPT: self.prompt_len} | {str(n): count * self.output_len for n, count in self.requests.items()}


PLAN = GgufPlan({1: 2, 8: 8})


@dataclass(frozen=True, slots=True)
class _Texts(Load):
    token_ids: Sequence[TokenIds] = ()

    def prompts(self) -> list[TokenIds]:
        return list(self.token_ids)


_WARM_UP = _Texts(1, 0, 64, concurrency=1, token_ids=[list(range(100, 164))])


class Problems:
    """HumanEval's problems as chats in token ids; each is handed out once before the first comes again.

    Args:
        tokenize: returns the token ids of a chat whose only message is the text.
    """

    def __init__(self, tokenize: Callable[[str], TokenIds]) -> None:
        self._tokenize = tokenize
        with gzip.open(fetch(HUMAN_EVAL), "rt", encoding="utf-8") as lines:
            self._texts = [json.loads(line)["prompt"] for line in lines]
        self._num_taken = 0

    def take(self, count: int) -> list[TokenIds]:
        """Return the next chats, one problem in each."""
        return [self._tokenize(f"{_TASK}\n\n```python\n{self._next()}```") for _ in range(count)]

    def take_long(self, num_tokens: int) -> TokenIds:
        """Return the beginning of a chat about many problems, in so many tokens."""
        text, ids = _TASK, TokenIds()
        while len(ids) < num_tokens:
            text += f"\n\n{self._next()}"
            ids = self._tokenize(text)
        return ids[:num_tokens]

    def _next(self) -> str:
        self._num_taken += 1
        text: str = self._texts[(self._num_taken - 1) % len(self._texts)]
        return text


def compare(model: Path, formats: Sequence[str], threads: int, plan: GgufPlan, output: Path) -> str:
    """Measure one file, write a record into a folder, and return the table.

    Args:
        formats: of this server's weights: keys of launch.OUR_WEIGHTS.

    Raises:
        PeerError: a server did not start or failed.
    """
    settings = Settings(threads=threads, max_seqs=max(plan.requests), max_len=_MAX_LEN, kv_cache_dtype="auto")
    machine, states = Machine(threads), list[dict[str, float]]()
    progress = Progress(plan.rounds * len(plan.tokens), model.name)

    def on_round() -> None:
        states.append(machine.measure())
        progress.advance(state_line(states[-1]))

    with ExitStack() as stack:
        servers = {key: _started(stack, key, model, settings) for key in [*formats, LLAMACPP]}
        cases = _measure(servers, plan, on_round)
        memory = {key: server.memory_bytes() for key, server in servers.items()}
    metrics = {"cases": [asdict(case) for case in cases], "memory_bytes": memory}
    workload = {"model": model.name, "threads": threads, "plan": asdict(plan), "rounds": states}
    Record(
        kind="gguf", name=model.stem, config={}, hardware=describe_hardware(), workload=workload, metrics=metrics
    ).save(output)
    return _table(cases, memory)


def _started(stack: ExitStack, key: str, model: Path, settings: Settings) -> Server:
    def program(port: int) -> launch.Launch:
        peer, weights = (LLAMACPP, "") if key == LLAMACPP else (OURS, key)
        drafting = [] if peer == LLAMACPP else ["--speculative-config", "auto"]
        return launch.model_server(peer, model, weights, port, settings, drafting)

    server = Server(program, LOGS / f"gguf-{model.stem}-{key.replace(' ', '-')}.log")
    stack.callback(server.close)
    server.wait_ready()
    server.pause()
    return server


def _measure(servers: Mapping[str, Server], plan: GgufPlan, on_round: Callable[[], None]) -> list[Case]:
    """Return a case for each row of the table (its `peer`) and column (its `case`)."""
    ways = {f"{key}, {way}": (key, extra) for key in servers if key != LLAMACPP for way, extra in _WAYS.items()}
    rows = {**ways, LLAMACPP: (LLAMACPP, {})}
    first = next(iter(servers.values()))
    problems = Problems(first.tokenize)
    found: list[Case] = []
    for column, num_tokens in plan.tokens.items():
        cases = {row: Case(column, row, num_tokens) for row in rows}
        turns = Turns(
            {row: servers[key] for row, (key, _) in rows.items()}, {r: [c] for r, c in cases.items()}, on_round
        )
        turns.once(lambda row: servers[rows[row][0]].run(_WARM_UP, rows[row][1]))
        for number in range(plan.rounds):
            first.resume()
            load = _load(column, plan, problems)
            first.pause()

            def run(row: str, load: Load = load, cases: dict[str, Case] = cases) -> None:
                key, extra = rows[row]
                cases[row].seconds.append([servers[key].run(load, extra)])

            turns.rounds(1, run, first=number)
        found += cases.values()
    return found


def _load(column: str, plan: GgufPlan, problems: Problems) -> Load:
    """The next requests of a column, which no server has seen."""
    if column == PROMPT:
        return _Texts(1, plan.prompt_len, 1, concurrency=1, token_ids=[problems.take_long(plan.prompt_len)])
    concurrency = int(column)
    count = plan.requests[concurrency]
    return _Texts(count, 0, plan.output_len, concurrency=concurrency, token_ids=problems.take(count))


def _table(cases: Sequence[Case], memory: Mapping[str, int]) -> str:
    """Tokens per second at the median round, and the median over the rounds of the ratio to llama.cpp."""
    columns = list(dict.fromkeys(case.case for case in cases))
    rows: list[list[object]] = []
    for row in dict.fromkeys(case.peer for case in cases):
        of_row = {case.case: case for case in cases if case.peer == row}
        cells = [_cell(of_row[column], cases) for column in columns]
        rows.append([row, *cells, f"{memory[row.rpartition(', ')[0] or row] / 1e9:.2f}"])
    heads = [f"{column} in flight" if column != PROMPT else "prompt" for column in columns]
    failed = [f"{case.peer}: {case.failed}" for case in cases if case.failed is not None]
    return "\n".join([markdown_table(["Weights", *heads, "GB"], rows), *failed])


def _cell(case: Case, cases: Sequence[Case]) -> str | None:
    if case.failed is not None:
        return None
    [other] = [c for c in cases if c.case == case.case and c.peer == LLAMACPP]
    text = f"{case.tokens_per_s():.1f}"
    if other is case or other.failed is not None:
        return text
    return f"{text} ({median(speed_ratios(case, other)):.2f}x)"
