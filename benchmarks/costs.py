"""`bench costs`: what steps and drafting calls cost, as a server measures it when it starts; writes the profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command, table_of, with_default
from benchmarks.configurations import without_cache_file
from fastdeploy_sd.config import load_config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.profile import CostProfile


def main(argv: Sequence[str]) -> int:
    """Measure one configuration, write its profile and print both tables."""
    command = Command(
        "costs",
        "Measure steps of several shapes and calls of every drafting method, and write them as a profile.",
        "the engine's (--model, --speculative-config, --num-threads, ...)",
    )
    command.number("--budget-ms", 2000, "milliseconds that it may take, about")
    path = OUTPUT_DIR / "costs.json"
    command.add_argument("--out", type=Path, default=path, metavar="FILE", help=f"the profile (default: {path})")
    args = command.read(argv)
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    ensure_checkpoint(options)
    config = without_cache_file(load_config(options, command.prog))
    from fastdeploy_sd.distributed.executor import create_executor
    from fastdeploy_sd.worker.autotune.cost_file import profile_of
    from fastdeploy_sd.worker.autotune.cost_measurement import measure_costs

    executor = create_executor(config)
    try:
        info, limits = executor.model_info, config.scheduler
        costs = measure_costs(
            executor.execute, info, limits.max_num_seqs, limits.max_num_batched_tokens, args.budget_ms / 1e3
        )
        profile = profile_of(config, info, costs)
    finally:
        executor.shutdown()
    if not profile.steps:
        raise ConfigError("kv_cache_memory_gb: expected room for a request and its drafts, got less")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    profile.save(args.out)
    print(costs_tables(profile))
    if not costs.is_steady:
        print("\nSteps of the same shape took very different times: something else runs on this machine.")
    return 0


def costs_tables(profile: CostProfile) -> str:
    """Return a profile as two Markdown tables: steps, against one row of one request, and drafting calls."""
    one_row_ms = next(s.ms for s in profile.steps if (s.rows, s.requests) == (1, 1))
    steps = table_of(
        profile.steps,
        {
            "Requests": "{0.requests}",
            "Rows": "{0.rows}",
            "Context": "{0.context}",
            "Step ms": "{0.ms:.3f}",
            "T / T(1)": lambda s: f"{s.ms / one_row_ms:.2f}",
        },
    )
    drafts = table_of(
        profile.drafts,
        {
            "Method": "{0.method}",
            "Requests": "{0.requests}",
            "Drafts": "{0.drafts}",
            "Call ms": "{0.ms:.3f}",
            "Call / T(1)": lambda s: f"{s.ms / one_row_ms:.2f}",
        },
    )
    return f"{steps}\n\n{drafts}"
