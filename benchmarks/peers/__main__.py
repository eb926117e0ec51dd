"""`python -m benchmarks.peers COMMAND`: setup (install the peers, convert the checkpoint), run, report."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.catalogue import BITS, OURS, PEERS
from benchmarks.peers.paths import RESULTS_DIR
from benchmarks.peers.plan import METRICS, QUICK, QUICK_METRICS, QUICK_PEERS, Plan
from fastdeploy_sd.errors import ConfigError, FdsdError, suggest

_PROG = "python -m benchmarks.peers"
_WRONG_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status: 0, 1 for a failed run, 2 for wrong options."""
    # Peers that wait for their turn are stopped; whatever ends this process must end them too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(f"{__doc__}\nEvery command has --help.")
        return 0
    try:
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise ConfigError(f"command: expected one of {known}, got {name!r}{suggest(name, COMMANDS)}")
        return COMMANDS[name](argv[1:])
    except FdsdError as error:
        print(f"peers: {error.message}", file=sys.stderr)
        return _WRONG_USAGE if isinstance(error, ConfigError) else 1


def _setup(argv: Sequence[str]) -> int:
    from benchmarks.peers import convert, install

    parser = _parser(
        "setup", "Install the peers into build/peers, each in an environment of its own, and convert the checkpoint."
    )
    others = [peer for peer in PEERS if peer != OURS]
    parser.add_argument("--peers", nargs="+", default=others, choices=others, help="(default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="of the build of llama.cpp")
    args = parser.parse_args(argv)
    # llama.cpp's converter runs in the environment of transformers.
    converters = ["transformers"] if "llamacpp" in args.peers else []
    for peer in dict.fromkeys([*converters, *args.peers]):
        install.install(peer, args.jobs)
    convert.convert(args.peers)
    return 0


def _run(argv: Sequence[str]) -> int:
    parser = _parser("run", "Measure the peers turn about, write records, print the tables and draw the plot.")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="(default: all; --quick: three)")
    parser.add_argument("--bits", nargs="+", default=list(BITS), choices=BITS, help="of weights (default: all)")
    parser.add_argument("--metrics", nargs="+", choices=METRICS, help="(default: all; --quick: all but http)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of every peer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of every peer (default: 4, with --quick 2)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"), help="of this server")
    parser.add_argument("--quick", action="store_true", help="fewer peers, metrics, sizes and rounds")
    parser.add_argument(
        "--output", type=Path, default=RESULTS_DIR, metavar="DIR", help="for the records (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="measure also what has a record already")
    args = parser.parse_args(argv)
    if args.threads < 1 or (args.rounds is not None and args.rounds < 1):
        raise ConfigError("threads, rounds: expected at least 1")
    # NumPy's BLAS tells the processor's speed; it reads this when it is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    from benchmarks.peers.run import Comparison, Scope

    plan = QUICK if args.quick else Plan()
    peers = args.peers or (QUICK_PEERS if args.quick else PEERS)
    metrics = args.metrics or (QUICK_METRICS if args.quick else METRICS)
    if args.rounds is not None:
        plan = replace(plan, rounds=args.rounds)
    if args.again:
        for bits in args.bits:
            for metric in metrics:
                (args.output / f"{metric}-{bits}.json").unlink(missing_ok=True)
    scope = Scope(tuple(peers), args.bits, tuple(metrics), args.threads, args.kv_cache_dtype, plan, args.output)
    Comparison(scope).run()
    return _report(["--output", str(args.output)])


def _report(argv: Sequence[str]) -> int:
    from benchmarks.peers.report import write_report

    parser = _parser("report", "Print the tables of the records and write them beside them, with the plot.")
    parser.add_argument(
        "--output", type=Path, default=RESULTS_DIR, metavar="DIR", help="of the records (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    print(write_report(args.output))
    return 0


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"{_PROG} {command}", allow_abbrev=False, description=description)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"setup": _setup, "run": _run, "report": _report}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
