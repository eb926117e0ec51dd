"""Differential trials: random requests, computed alone without drafts and then in other ways; all bytes are compared.

    python -m tests.fuzz.differential --model DIR [--trials N] [--seed S] [--ways NAME...] [--forever]

A trial is one random request in one way against its baseline: alone in a server with plain decoding and without a
prefix cache. Ways are in trial_ways.py; in each, 16 requests are sent twice by 8 to 16 clients at once. A trial whose
answer differs is printed with the command that repeats its group of requests in its way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz.guided_sampling import DEMO_MODEL
from tests.fuzz.soak_load import Ask, put
from tests.fuzz.trial_requests import GROUP, RequestMaker
from tests.fuzz.trial_ways import BASELINE, WAYS, Served, Way, refusal, serving
from tests.server.answers import Answer, Choice

MIN_CLIENTS = 8
PASSES = 2
MAX_FINDINGS = 20


@dataclass
class Report:
    """What a run saw.

    Attributes:
        counts: by way, "baseline" included: trials and what happened in them, in the words of the report.
        findings: trials that differ, each with how to repeat it.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A count, over all ways."""
        return sum(counts[name] for counts in self.counts.values())

    def __str__(self) -> str:
        ways = [f"{way}: {', '.join(f'{n} {name}' for name, n in c.items())}" for way, c in self.counts.items()]
        trials = f"{self.total('trials')} trials, {self.total('preempted trials')} preempted"
        return "\n".join([*ways, f"{trials}; {len(self.findings)} differ", *self.findings])


@dataclass(frozen=True)
class Trial:
    """A request in one way, once. fields: what is added to its body there."""

    ask: Ask
    expected: Answer
    fields: dict[str, Any]

    async def run(self, client: httpx.AsyncClient, url: str) -> Answer:
        """Send it; return what came."""
        return await put(client, url, replace(self.ask, body=self.ask.body | self.fields))


def difference(expected: Answer, got: Answer) -> str:
    """Return the first difference between two answers, "" = there is none.

    Where both end with the same error, what is there of both is compared: a whole answer with an error has no text.
    """
    if got.broken:
        return f"the connection: {got.broken}"
    if expected.error != got.error:
        return f"error: expected {expected.error}, got {got.error}"
    if got.error is not None:
        shared = expected.choices.keys() & got.choices.keys()
        return next((d for i in sorted(shared) if (d := _parted(i, expected.choices[i], got.choices[i]))), "")
    if expected.choices.keys() != got.choices.keys():
        return f"choices: expected {sorted(expected.choices)}, got {sorted(got.choices)}"
    for index, choice in expected.choices.items():
        for name in ("token_ids", "text", "logprobs", "calls", "ends"):
            a, b = getattr(choice, name), getattr(got.choices[index], name)
            if a != b:
                return f"choice {index}, {name}: {_first_difference(a, b)}"
    return "" if expected.usage == got.usage else f"usage: expected {expected.usage}, got {got.usage}"


def _parted(index: int, expected: Choice, got: Choice) -> str:
    """How two choices part, of which one may be a beginning of the other."""
    is_part = expected.begins(got) or got.begins(expected)
    return "" if is_part else f"choice {index} before the error: expected {expected}, got {got}"


def _first_difference(expected: Any, got: Any) -> str:
    if isinstance(expected, dict):
        name = next(name for name in sorted({*expected, *got}) if expected.get(name) != got.get(name))
        return f"{name}: {_first_difference(expected.get(name, []), got.get(name, []))}"
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(expected, got, fillvalue=itertools)) if a != b)
    return f"from {at} on expected {expected[at : at + 8]!r}, got {got[at : at + 8]!r}"


async def compute_baseline(url: str, asks: Iterable[Ask], counts: Counter[str]) -> list[tuple[Ask, Answer]]:
    """Return the requests that are taken and their answers, computed one after the other, as streams.

    What is refused before anything is computed is no trial.
    """
    answers = []
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        for ask in asks:
            answer = await Trial(ask, Answer(), streamed).run(client, url)
            assert not answer.broken, (ask, answer)
            if answer.status != httpx.codes.OK:
                assert answer.status == httpx.codes.BAD_REQUEST, (ask, answer)
                counts["refused"] += 1
                continue
            counts["requests"] += 1
            counts["ended by an error"] += answer.error is not None
            answers.append((ask, answer))
    return answers


class Runner:
    """Runs trials on one model.

    Args:
        model: a folder, or "demo".
        options: of every server.
        command: what repeats a group, without the group's numbers.
    """

    def __init__(self, model: str, options: dict[str, Any], command: str) -> None:
        self._model, self._options, self._command = model, options, command
        self.report = Report()

    def run(self, seed: int, groups: Sequence[int], ways: Iterable[Way]) -> None:
        """Run groups of requests in some ways; the report grows."""
        counts = self.report.counts.setdefault(BASELINE.name, Counter())
        numbers = [number for group in groups for number in range(group * GROUP, (group + 1) * GROUP)]
        with serving(BASELINE, self._model, **self._options) as served:
            asks = (RequestMaker(seed, number).make() for number in numbers)
            answers = asyncio.run(compute_baseline(served.url, asks, counts))
        for way in ways:
            begin = time.monotonic()
            with serving(way, self._model, **self._options) as served:
                asyncio.run(self._run_way(seed, groups, way, served, answers))
                counts = self.report.counts[way.name]
                counts.update(served.counts())
            print(f"{way.name}, {time.monotonic() - begin:.0f} s: {dict(counts)}", file=sys.stderr, flush=True)

    async def _run_way(
        self, seed: int, groups: Sequence[int], way: Way, served: Served, answers: Sequence[tuple[Ask, Answer]]
    ) -> None:
        for group, number in itertools.product(groups, range(PASSES)):
            rng = random.Random(f"{way.name} {seed}:{group}:{number}")
            trials = [Trial(a, answer, way.fields(rng)) for a, answer in answers if a.number // GROUP == group]
            rng.shuffle(trials)
            repeat = f"{self._command} --seed {seed} --first {group} --groups 1 --ways {way.name}"
            await self._run_group(trials, way, served.url, rng.randint(MIN_CLIENTS, GROUP), f"{repeat}, pass {number}")

    async def _run_group(self, trials: Sequence[Trial], way: Way, url: str, num_clients: int, where: str) -> None:
        # A connection per request: one that is kept may be closed by the server as it is used again.
        limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            answers = await asyncio.gather(*(trial.run(client, url) for trial in trials))
            for trial, answer in zip(trials, answers, strict=True):
                self._count(way, trial, answer)
                if what := difference(trial.expected, answer):
                    alone = difference(trial.expected, await trial.run(client, url))
                    self._add_finding(trial, f"{where}: {what}; alone there: {alone or 'equal'}")

    def _count(self, way: Way, trial: Trial, answer: Answer) -> None:
        counts = self.report.counts.setdefault(way.name, Counter())
        counts["trials"] += 1
        counts["preempted trials"] += any(choice.num_preemptions for choice in answer.choices.values())
        counts["compared tokens"] += sum(len(choice.token_ids) for choice in answer.choices.values())
        counts["prompt tokens"] += answer.usage[0] if answer.usage else 0

    def _add_finding(self, trial: Trial, text: str) -> None:
        if len(self.report.findings) < MAX_FINDINGS:
            body = json.dumps(trial.ask.body | trial.fields, ensure_ascii=False)
            self.report.findings.append(f"DIFFERENT {text}; {trial.ask.path} {body}")
            print(self.report.findings[-1], file=sys.stderr, flush=True)


def main() -> int:
    """Entry point; the exit status is 1 when a trial differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="folder of a model, or demo")
    parser.add_argument("--quantization", help="as of a server")
    parser.add_argument("--trials", type=int, default=1000, help="about how many")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS], metavar="NAME", help=", ".join(WAYS))
    parser.add_argument("--first", type=int, default=0, help="number of the first group of requests")
    parser.add_argument("--groups", type=int, help="how many groups of requests, in place of --trials")
    parser.add_argument("--forever", action="store_true", help="go on with the next seed until a trial differs")
    parser.add_argument("--json", type=Path, help="file for the counts")
    arguments = parser.parse_args()
    folder = DEMO_MODEL if arguments.model == "demo" else Path(arguments.model)
    ways = []
    for name in arguments.ways:
        if reason := refusal(WAYS[name], folder):
            print(f"left out: {name}: {reason}", flush=True)
        else:
            ways.append(WAYS[name])
    options = {"quantization": arguments.quantization} if arguments.quantization else {}
    command = f"python -m tests.fuzz.differential --model {shlex.quote(arguments.model)}"
    command += "".join(f" --{name} {value}" for name, value in options.items())
    num_groups = arguments.groups or -(-arguments.trials // (len(ways) * PASSES * GROUP))
    runner = Runner(arguments.model, options, command)
    for seed in itertools.count(arguments.seed):
        with contextlib.redirect_stdout(sys.stderr):  # servers' logs are printed when they end
            runner.run(seed, range(arguments.first, arguments.first + num_groups), ways)
        print(f"seed {seed}: {runner.report}", flush=True)
        if arguments.json is not None:
            result = {"seed": seed, "model": arguments.model, "options": options, **vars(runner.report)}
            arguments.json.write_text(json.dumps(result, indent=1))
        if runner.report.findings or not arguments.forever:
            return 1 if runner.report.findings else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
