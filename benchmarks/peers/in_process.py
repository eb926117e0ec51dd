"""Measures decoding, prompts and forward passes of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.peers.catalogue import Plan
from benchmarks.peers.counting import answer, random_prompt
from benchmarks.peers.process import Turns, Worker, verify_tokens
from benchmarks.peers.protocol import TokenIds
from benchmarks.peers.results import Case

CALL_TIMEOUT_S = 300.0
_WARM_UP_STEPS = 4
# The first sample of a turn pays for the caches that others have filled, and is dropped.
_DROPPED = 1


class InProcess:
    """One run over some loaded workers.

    Args:
        workers: by peer, all of them paused.
        on_round: called before every round; measures the machine.
    """

    def __init__(self, workers: Mapping[str, Worker], plan: Plan, on_round: Callable[[], None]) -> None:
        self._workers, self._plan, self._on_round = workers, plan, on_round
        self._num_prompts = 0

    def measure(self, metric: str) -> list[Case]:
        """All cases of decode, prefill or forward."""
        measures = {"decode": self._decode, "prefill": self._prefill, "forward": self._forward}
        return list(measures[metric]())

    def _decode(self) -> Iterator[Case]:
        """A case is a number of sequences; their speeds are added."""
        for batch in self._plan.batches:
            cases = self._cases(str(batch), batch)
            self._decode_batch([self._prompt(self._plan.prompt_len) for _ in range(batch)], cases)
            yield from cases.values()

    def _decode_batch(self, prompts: list[TokenIds], cases: dict[str, Case]) -> None:
        plan = self._plan
        turns = Turns(self._workers, {peer: [case] for peer, case in cases.items()}, self._on_round)
        steps = plan.steps + _DROPPED
        num_tokens = 1 + _WARM_UP_STEPS + plan.rounds * steps
        expected = [answer(prompt, num_tokens) for prompt in prompts]
        columns = [list(step) for step in zip(*expected, strict=True)]

        def start(peer: str) -> None:
            first = self._call(peer, "start", prompts=prompts)
            verify_tokens(first["tokens"], columns[0])
            self._call(peer, "decode", steps=_WARM_UP_STEPS)

        def decode(peer: str) -> None:
            done = 1 + _WARM_UP_STEPS + len(cases[peer].seconds) * steps
            result = self._call(peer, "decode", steps=steps)
            for got, column in zip(result["tokens"], columns[done : done + steps], strict=True):
                verify_tokens(got, column)
            cases[peer].seconds.append(result["seconds"][_DROPPED:])

        turns.once(start)
        turns.rounds(plan.rounds, decode)
        turns.once(lambda peer: self._call(peer, "stop"))

    def _prefill(self) -> Iterator[Case]:
        """The only case is the length of the prompt; the time is to its first token."""
        length = self._plan.prefill_len
        cases = self._cases(str(length), length)

        def prefill(peer: str) -> float:
            prompt = self._prompt(length)
            result = self._call(peer, "prefill", prompt=prompt)
            verify_tokens(result["tokens"], answer(prompt, 1))
            return float(result["seconds"])

        turns = Turns(self._workers, {peer: [case] for peer, case in cases.items()}, self._on_round)
        turns.once(prefill)
        turns.rounds(self._plan.rounds, lambda peer: cases[peer].seconds.append([prefill(peer)]))
        yield from cases.values()

    def _forward(self) -> Iterator[Case]:
        """A case is "M@context": one pass over M rows after that many tokens."""
        for context in self._plan.contexts:
            cases = {rows: self._cases(f"{rows}@{context}", rows) for rows in self._plan.rows}
            self._forward_context(self._prompt(context), cases)
            for by_peer in cases.values():
                yield from by_peer.values()

    def _forward_context(self, prompt: TokenIds, cases: dict[int, dict[str, Case]]) -> None:
        of_peer = {peer: [by_peer[peer] for by_peer in cases.values()] for peer in self._workers}
        turns = Turns(self._workers, of_peer, self._on_round)

        def start(peer: str) -> None:
            self._call(peer, "context", prompt=prompt)
            for rows in cases:
                self._call(peer, "forward", rows=rows, repeats=1)

        def forward(peer: str) -> None:
            for rows, by_peer in cases.items():
                result = self._call(peer, "forward", rows=rows, repeats=self._plan.repeats + _DROPPED)
                by_peer[peer].seconds.append(result["seconds"][_DROPPED:])

        turns.once(start)
        turns.rounds(self._plan.rounds, forward)
        turns.once(lambda peer: self._call(peer, "stop"))

    def _cases(self, name: str, work: int) -> dict[str, Case]:
        return {peer: Case(name, peer, work) for peer in self._workers}

    def _prompt(self, length: int) -> TokenIds:
        """A prompt that no peer has seen."""
        self._num_prompts += 1
        return random_prompt(length, self._num_prompts)

    def _call(self, peer: str, command: str, **arguments: Any) -> dict[str, Any]:
        return self._workers[peer].call(command, CALL_TIMEOUT_S, **arguments)
