"""How much of each metric is measured. Knows no peers."""

from __future__ import annotations

from dataclasses import dataclass

IN_PROCESS = ("decode", "prefill", "forward")
METRICS = (*IN_PROCESS, "http", "speculation")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run; the defaults take about 25 minutes for all peers.

    Attributes:
        batches: sequences that decode together.
        prompt_len: of decoded sequences. steps: decoded per round and peer.
        prefill_len: of prompts whose computation is timed.
        rows, contexts: of forward passes. repeats: of each per round.
        concurrency: requests in flight over HTTP. http_requests: sent in all at least. output_len: of each.
        copy_prompts, copy_output_len: of the speculation metric. max_drafters: ways of drafting tried per peer.
        rounds: turns of the peers, server_rounds: over HTTP.
    """

    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    prompt_len: int = 128
    steps: int = 12
    prefill_len: int = 512
    rows: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32)
    contexts: tuple[int, ...] = (512, 4096)
    repeats: int = 2
    concurrency: tuple[int, ...] = (1, 8)
    http_requests: int = 2
    output_len: int = 64
    copy_prompts: int = 1
    copy_output_len: int = 240
    max_drafters: int = 2
    rounds: int = 4
    server_rounds: int = 2

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence of any metric, with room for what forward passes leave behind."""
        behind = (self.rounds + 1) * (self.repeats + 1) * sum(self.rows)
        return -(-(max(self.contexts) + behind) // 256) * 256

    def num_requests(self, concurrency: int) -> int:
        """Requests of one turn over HTTP."""
        return max(concurrency, self.http_requests)

    def num_rounds(self, metric: str) -> int:
        """Rounds of a metric at one number of bits."""
        counts = {
            "decode": len(self.batches) * self.rounds,
            "prefill": self.rounds,
            "forward": len(self.contexts) * self.rounds,
            "http": len(self.concurrency) * self.server_rounds,
            "speculation": self.server_rounds,
        }
        return counts[metric]


QUICK_PEERS = ("ours", "llamacpp", "openvino")
QUICK_METRICS = ("decode", "prefill", "forward", "speculation")
QUICK = Plan(
    batches=(1, 8),
    steps=8,
    rows=(1, 5, 8),
    contexts=(512,),
    copy_output_len=120,
    max_drafters=1,
    rounds=2,
    server_rounds=1,
)
