"""`python -m benchmarks peers COMMAND`: setup (install the peers, convert the checkpoint), run, report, gguf."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.command import OUTPUT_DIR, Command
from benchmarks.peers.catalogue import BITS, METRICS, OURS, PEERS, QUICK, QUICK_METRICS, QUICK_PEERS, RESULTS_DIR, Plan
from benchmarks.peers.launch import AS_FILE, OUR_WEIGHTS, verify_installed
from fastdeploy_sd.errors import ConfigError, suggest


def main(argv: Sequence[str]) -> int:
    """Run a command.

    Raises:
        ConfigError: there is no such command, or an option is wrong.
        FdsdError: the run failed.
    """
    # Peers that wait for their turn are stopped; whatever ends this process must end them too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(f"{__doc__}\nEvery command has --help.")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ConfigError(f"peers: expected one of {known}, got {name!r}{suggest(name, COMMANDS)}")
    COMMANDS[name](argv[1:])
    return 0


def _setup(argv: Sequence[str]) -> None:
    from benchmarks.peers import install

    text = "Install the peers into build/peers, each in an environment of its own, and convert the checkpoint."
    command = Command("peers setup", text)
    others = [peer for peer in PEERS if peer != OURS]
    command.some("--peers", others, "(default: all)", others)
    command.number("--jobs", os.cpu_count() or 1, "of the build of llama.cpp")
    command.add_argument("--no-convert", action="store_true", help="install only, which is all that `peers gguf` needs")
    args = command.read(argv)
    # llama.cpp's converter runs in the environment of transformers.
    converters = ["transformers"] if "llamacpp" in args.peers and not args.no_convert else []
    for peer in dict.fromkeys([*converters, *args.peers]):
        install.install(peer, args.jobs)
    if not args.no_convert:
        install.convert(args.peers)


def _run(argv: Sequence[str]) -> None:
    text = "Measure the peers interleaved, write records, print the tables and draw the plot."
    command = Command("peers run", text)
    command.some("--peers", PEERS, "(default: all; --quick: three)")
    command.some("--bits", BITS, "of weights (default: all)", BITS)
    command.some("--metrics", METRICS, "(default: all; --quick: all but http)")
    command.number("--threads", 2, "of every peer")
    command.number("--rounds", None, "turns of every peer (default: 4, with --quick 2)")
    command.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"), help="of this server")
    command.add_argument("--quick", action="store_true", help="fewer peers, metrics, sizes and rounds")
    command.folder(RESULTS_DIR, "for the records")
    command.add_argument("--again", action="store_true", help="measure also what has a record already")
    args = command.read(argv)
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
    _print_report(args.output)


def _report(argv: Sequence[str]) -> None:
    command = Command("peers report", "Print the tables of the records; write them and the plot into the folder.")
    command.folder(RESULTS_DIR, "of the records")
    _print_report(command.read(argv).output)


def _gguf(argv: Sequence[str]) -> None:
    text = "Measure this server and llama.cpp on the same GGUF files, over HTTP and in turns, on HumanEval's problems."
    command = Command("peers gguf", text)
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="GGUF file")
    command.some("--formats", OUR_WEIGHTS, "of this server's weights", [AS_FILE])
    command.number("--threads", 2, "of either server")
    command.number("--rounds", 3, "turns of either server")
    command.folder(OUTPUT_DIR)
    args = command.read(argv)
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    from benchmarks.peers import gguf

    verify_installed("llamacpp")
    for file in args.files:
        if not file.is_file():
            raise ConfigError(f"FILE: expected a GGUF file, got {file}", param="FILE")
    for file in args.files:
        table = gguf.compare(
            file.resolve(), args.formats, args.threads, replace(gguf.PLAN, rounds=args.rounds), args.output
        )
        print(f"{file.name}, tokens per second\n\n{table}\n", flush=True)


def _print_report(folder: Path) -> None:
    from benchmarks.peers.report import write_report

    print(write_report(folder))


COMMANDS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "setup": _setup,
    "run": _run,
    "report": _report,
    "gguf": _gguf,
}
