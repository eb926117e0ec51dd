"""`fastdeploy-sd verify`: the equality matrix on the user's own model."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fastdeploy_sd.cli.arguments import Parser, read_names
from fastdeploy_sd.cli.verify import (
    METHOD_NAMES,
    USUAL_LENGTHS,
    EngineVariant,
    Lengths,
    Matrix,
    Method,
    Reference,
    all_variants,
    available_methods,
    make_reference,
    quick_variants,
    run_matrix,
    runnable_variants,
    standard_methods,
)
from fastdeploy_sd.cli.verify.progress import CellProgress, duration, estimate_s, say
from fastdeploy_sd.cli.verify.report import findings, matrix_json, matrix_table
from fastdeploy_sd.config import Config, load_config
from fastdeploy_sd.config.speculative import SPECULATIVE_OPTION
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub import located
from fastdeploy_sd.process.log_files import show_lines, worker_lines_from
from fastdeploy_sd.types.draft_methods import METHODS

_PROG = "fastdeploy-sd verify"
_NUM_REQUESTS = 64
# Some drafts and some grammars; prompts with a block of their own, and answers that reach into another one.
_LEAST_REQUESTS, _LEAST_PROMPT, _LEAST_OUTPUT = 4, 40, 17
_QUICK_LENGTHS = (3,)
_LENGTHS = (1, 3, 5)


def main(argv: Sequence[str]) -> int:
    """Run the matrix and print it; 1 when an answer differs or something was not exercised.

    Raises:
        ConfigError: an option is wrong, or a method that was asked for cannot be loaded.
        CheckpointError: the model cannot be loaded.
    """
    args, engine_argv = _parser().parse_known_args(argv)
    config = _without_cache_file(located(load_config(engine_argv, _PROG)))
    _refuse_lossy(config)
    show_lines("verify")
    lengths = Lengths.up_to(args.prompt_tokens, args.output_tokens)
    chosen = _chosen_variants(quick_variants(lengths) if args.quick else all_variants(lengths), args.way)
    from fastdeploy_sd.worker.loading.forecast import num_kv_groups  # brings in Paddle

    num_groups = num_kv_groups(config)  # the ways count blocks of one
    chosen = [replace(way, num_blocks=num_groups * way.num_blocks) for way in chosen]
    with worker_lines_from(logging.WARNING):  # lines in the log per loaded engine would bury the table
        methods, unavailable = _methods(args, config)
        ways, not_runnable = runnable_variants(config, chosen)
        reference, matrix = _run(config, args, lengths, ways, methods)
    unavailable = {**unavailable, **not_runnable}
    if reference.unguided:
        unavailable["guided requests"] = reference.unguided
    if args.json:
        print(json.dumps(matrix_json(matrix, unavailable), indent=1))
    else:
        _print(matrix, unavailable, reference)
    return 0 if matrix.is_proof else 1


def _run(
    config: Config, args: argparse.Namespace, lengths: Lengths, ways: Sequence[EngineVariant], methods: Sequence[Method]
) -> tuple[Reference, Matrix]:
    """Run the requests alone, then the cells; says how long it will take as soon as that can be told."""
    say(f"{args.requests} requests alone with plain decoding, then {len(ways) * len(methods)} cells")
    begin = time.monotonic()
    reference = make_reference(config, args.seed, args.requests, has_guided=True, lengths=lengths)
    alone_s = time.monotonic() - begin
    left_s = estimate_s(ways, len(methods), args.requests, alone_s)
    say(f"alone they took {duration(alone_s)}; {len(ways)} ways with {len(methods)} methods, about {duration(left_s)}")
    with CellProgress(len(ways) * len(methods)) as progress:
        return reference, run_matrix(reference, ways, methods, progress.add)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROG,
        description="Run the same requests with every drafting method in every way an engine can run them, and compare "
        "tokens and log-probabilities, bit for bit, with plain decoding of each request by itself. Some have grammars.",
        epilog="How long it takes is said on standard error once the requests have run alone: about ten times as long "
        "for each column, with --quick twice (the demo model: minutes in all; a 0.6B model: hours). "
        "Every engine option is accepted too (--model, --quantization, --config FILE, ...); batch, chunk and "
        "cache sizes are the matrix's own. A drafting --speculative-config gets a column of its own, without its "
        "suffix_decoding_cache_file, and says where the MTP weights are and how they are stored. Exit status: 0 all "
        "equal, 1 a difference or something that was not exercised, 2 wrong options.",
    )
    text = f"columns, some of {','.join(METHOD_NAMES)} (default: all that the model can load)"
    parser.add_argument("--methods", type=read_names, metavar="A,B", help=text)
    text = f"drafts per step, each in a column of its own (default: {' '.join(map(str, _LENGTHS))})"
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", metavar="K", help=text)
    parser.add_argument("--quick", action="store_true", help="five ways and one K instead of the whole matrix")
    text = "only ways with this text in their names; may be given several times"
    parser.add_argument("--way", action="append", default=[], metavar="TEXT", help=text)
    text = f"requests of the matrix, from {_LEAST_REQUESTS} on (default: %(default)s)"
    parser.add_argument("--requests", type=_at_least(_LEAST_REQUESTS), default=_NUM_REQUESTS, metavar="N", help=text)
    text = f"longest prompt, from {_LEAST_PROMPT} on; the others in proportion (default: %(default)s)"
    usual = USUAL_LENGTHS.prompt
    parser.add_argument("--prompt-tokens", type=_at_least(_LEAST_PROMPT), default=usual, metavar="N", help=text)
    text = f"longest answer, from {_LEAST_OUTPUT} on; the others in proportion (default: %(default)s)"
    usual = max(USUAL_LENGTHS.output)
    parser.add_argument("--output-tokens", type=_at_least(_LEAST_OUTPUT), default=usual, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of {least} or more, got {text!r}")
        return int(text)

    return read


def _chosen_variants(ways: Sequence[EngineVariant], texts: Sequence[str]) -> list[EngineVariant]:
    """The ways that have one of the texts in their names, all of them without any.

    Raises ConfigError: a text is in no name.
    """
    for text in texts:
        if not any(text in way.name for way in ways):
            names = "; ".join(way.name for way in ways)
            raise ConfigError(f"way: expected a part of one of these names: {names}; got {text!r}", param="way")
    return [way for way in ways if not texts or any(text in way.name for text in texts)]


def _refuse_lossy(config: Config) -> None:
    s = config.speculative
    if s.verify_strategy != "target_match" or s.accept_policy == "accept_all":
        raise ConfigError(
            "speculative_config: expected verify_strategy target_match and no accept_policy accept_all, which is not"
            f" meant to give plain decoding's tokens, got {s.verify_strategy} and {s.accept_policy}",
            param="speculative_config",
        )


def _without_cache_file(config: Config) -> Config:
    """Neither read nor write the cache file: no server should draft from the answers of the matrix."""
    return replace(config, speculative=replace(config.speculative, suffix_decoding_cache_file=None))


def _methods(args: argparse.Namespace, config: Config) -> tuple[list[Method], Mapping[str, str]]:
    """The columns, and why others cannot be loaded: found out before hours of running.

    What is configured, and every method and number of drafts that was asked for, must load; a method that was asked
    for without a number must load with one of the usual ones.
    """
    configured = config.speculative
    lengths = args.num_speculative_tokens or (_QUICK_LENGTHS if args.quick else _LENGTHS)
    names = METHOD_NAMES if args.methods is None else args.methods
    standard_methods(names, lengths, configured)  # refuses wrong names and numbers before anything is loaded
    is_asked_for = SPECULATIVE_OPTION in config.origins and configured.num_speculative_tokens > 0
    own = [Method("configured", configured)] if is_asked_for else []
    methods, reasons = available_methods(config, own)
    _refuse_missing("speculative_config", reasons)
    for name in dict.fromkeys(n for n in names if n != "mixed"):
        found, missing = available_methods(config, standard_methods([name], lengths, configured))
        if args.methods is not None and (args.num_speculative_tokens or not found):
            _refuse_missing("methods", missing)
        methods += found
        reasons |= missing
    if "mixed" in names:
        # Of the same length as the longest chain of drafts by a model that loads.
        with_model = [m.speculative for m in methods if METHODS[m.speculative.method].needs_model]
        longest = max(with_model, key=lambda s: s.num_model_steps, default=None)
        k, model_method = (max(lengths), None) if longest is None else (longest.num_model_steps, longest.method)
        methods += standard_methods(["mixed"], [k], configured, model_method)
    return methods, reasons


def _refuse_missing(option: str, reasons: Mapping[str, str]) -> None:
    for name, reason in reasons.items():
        raise ConfigError(f"{option}: expected what the model can load, got {name}: {reason}", param=option)


def _print(matrix: Matrix, unavailable: Mapping[str, str], reference: Reference) -> None:
    print(matrix_table(matrix, shutil.get_terminal_size((120, 24)).columns))
    print()
    for line in findings(matrix, unavailable):
        print(line)
    num_equal = len(matrix.cells) - len(matrix.differences)
    num_greedy = sum(r.sampling.temperature == 0.0 for r in reference.requests)
    num_guided = sum(bool(r.grammar) for r in reference.requests)
    print(
        f"{num_equal} of {len(matrix.cells)} cells equal to plain decoding, bit for bit:"
        f" {len(reference.requests)} requests, {num_greedy} greedy, {len(reference.requests) - num_greedy} sampled,"
        f" {num_guided} of them guided by grammars"
    )
