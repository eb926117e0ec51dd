"""Measures throughput of the servers, and speculation of servers and libraries on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.counting import COPY_LEN, answer
from benchmarks.peers.in_process import CALL_TIMEOUT_S
from benchmarks.peers.plan import Plan
from benchmarks.peers.process import Worker
from benchmarks.peers.results import Case
from benchmarks.peers.servers import Server, Texts
from benchmarks.peers.turns import Turns, verify_tokens

# Rounds count from 0, so the warm-up has texts of its own.
_WARM_UP_SEED = 99


def measure_http(servers: Mapping[str, Server], plan: Plan, on_round: Callable[[], None]) -> list[Case]:
    """Random prompts; a case is how many are in flight, its work all their output tokens."""
    cases: list[Case] = []
    for concurrency in plan.concurrency:
        num_requests = plan.num_requests(concurrency)
        by_peer = {peer: Case(str(concurrency), peer, num_requests * plan.output_len) for peer in servers}
        cases += by_peer.values()

        def run(peer: str, case_of: dict[str, Case] = by_peer, concurrency: int = concurrency) -> None:
            seconds = case_of[peer].seconds
            # Another prompt in every round and case: nothing is found in a prefix cache.
            seed = concurrency * plan.server_rounds + len(seconds)
            load = Texts(
                num_requests=plan.num_requests(concurrency),
                prompt_len=plan.prompt_len,
                output_len=plan.output_len,
                concurrency=concurrency,
                seed=seed,
            )
            seconds.append([servers[peer].run(load)])

        turns = Turns(servers, {peer: [case] for peer, case in by_peer.items()}, on_round)
        turns.rounds(plan.server_rounds, run)
    return cases


@dataclass(frozen=True, slots=True)
class Drafter:
    """One way of drafting of one peer: a server that does nothing else, or a worker and an option of its call."""

    peer: str
    name: str
    process: Server | Worker
    option: dict[str, Any]

    def run(self, texts: Texts) -> float:
        """Answer the texts one after the other; the seconds they took.

        Raises:
            PeerError: a request failed or an answer is wrong.
        """
        if isinstance(self.process, Server):
            return self.process.run(texts)
        seconds = 0.0
        for prompt in texts.prompts():
            arguments = {"prompt": prompt, "max_tokens": texts.output_len, "option": self.option}
            result = self.process.call("generate", CALL_TIMEOUT_S, **arguments)
            verify_tokens(result["tokens"], answer(prompt, texts.output_len))
            seconds += result["seconds"]
        return seconds


def measure_speculation(drafters: list[Drafter], plan: Plan, on_round: Callable[[], None]) -> list[Case]:
    """Texts to be copied with edits, one at a time, from the request to its last token; a case is a way of drafting."""
    keys = {f"{drafter.peer}, {drafter.name}": drafter for drafter in drafters}
    work = plan.copy_prompts * plan.copy_output_len
    cases = {key: Case(drafter.name, drafter.peer, work) for key, drafter in keys.items()}
    turns = Turns(
        {key: drafter.process for key, drafter in keys.items()}, {key: [case] for key, case in cases.items()}, on_round
    )
    turns.once(lambda key: keys[key].run(_texts(plan, _WARM_UP_SEED)))
    turns.rounds(
        plan.server_rounds,
        lambda key: cases[key].seconds.append([keys[key].run(_texts(plan, len(cases[key].seconds)))]),
    )
    return list(cases.values())


def _texts(plan: Plan, seed: int) -> Texts:
    return Texts(
        num_requests=plan.copy_prompts,
        prompt_len=COPY_LEN,
        output_len=plan.copy_output_len,
        concurrency=1,
        seed=seed,
        is_copy=True,
    )
