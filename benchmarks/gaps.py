"""`bench gaps`: how long streams wait for their next token while long prompts arrive, with and without `max_step_ms`.

One server for each setting, in turns round by round. Streams decode; when all of them have begun, prompts arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, show, table_of, with_default
from benchmarks.hardware import describe_hardware
from benchmarks.percentiles import Percentiles, percentiles
from benchmarks.prefill_decode import Sizes, Times, measure
from benchmarks.processes import running_server

_SETTINGS = {
    "no bound, fcfs": ("--max-step-ms", "0", "--scheduling-policy", "fcfs"),
    "no bound, fair": ("--max-step-ms", "0"),
    "default": (),
}


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a setting did, in milliseconds.

    Attributes:
        alone, beside: between two tokens of a stream, without prompts and with them.
        worst: the largest of `beside`.
        burst: until the first token of a prompt.
        prompt_tokens_per_s: of all prompts of a round, until the last one has its first token.
    """

    setting: str
    alone: Percentiles | None
    beside: Percentiles | None
    worst: float
    burst: Percentiles | None
    prompt_tokens_per_s: float


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    text = "Measure the gaps between a stream's tokens while long prompts arrive, with and without a bound."
    command = Command("gaps", text, "the servers' (default: Qwen3-0.6B's shape)")
    command.number("--prompt-len", 6000, "tokens of the prompts that arrive")
    command.number("--prompts", 1, "at once")
    command.number("--streams", 8)
    command.number("--output-len", 400, "tokens of a stream")
    command.number("--rounds", 3)
    command.json()
    args = command.read(argv)
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    options = with_default(options, "--kv-cache-memory-gb", 1)
    ensure_checkpoint(options)
    sizes = Sizes(1, 16, args.streams, args.output_len, args.prompts, burst_prompt_len=args.prompt_len)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running_server([*options, *setting]))[0] for name, setting in _SETTINGS.items()
        }
        times = measure(servers, sizes, args.rounds)
    rows = [_gaps(name, found, sizes) for name, found in times.items()]
    hardware = describe_hardware()
    record = {"hardware": hardware, "sizes": sizes, "settings": rows}
    show(args, record, f"{hardware['cpu']}; milliseconds\n\n{table_of(rows, _COLUMNS)}")
    return 0


def _gaps(name: str, times: Times, sizes: Sizes) -> Gaps:
    last = [max(times.burst[i : i + sizes.num_burst]) for i in range(0, len(times.burst), sizes.num_burst)]
    num_tokens = len(times.burst) * sizes.burst_prompt_len
    return Gaps(
        name,
        percentiles(times.alone),
        percentiles(times.beside),
        max(times.beside, default=0.0),
        percentiles(times.burst),
        num_tokens / sum(last) * 1e3,
    )


_COLUMNS = {
    "Setting": "{0.setting}",
    "Gap, p50": "{0.alone[p50]:.0f}",
    "with prompts, p50": "{0.beside[p50]:.0f}",
    "p99": "{0.beside[p99]:.0f}",
    "worst": "{0.worst:.0f}",
    "First token of a prompt, p50": "{0.burst[p50]:.0f}",
    "Prompt tokens/s": "{0.prompt_tokens_per_s:.0f}",
}
