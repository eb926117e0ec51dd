"""The `fastdeploy-sd` command: finds the subcommand and turns errors into one line and an exit code.

Knows no options of its own; every subcommand parses its arguments. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdeploy_sd import __version__
from fastdeploy_sd.errors import ConfigError, FdsdError, suggest

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: `run` takes its arguments and returns the exit code."""

    help: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments[0] if arguments else "--help", arguments[1:])
    except FdsdError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; what is still buffered must not make the interpreter complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version", "version"):
        print(__version__)
        return 0
    if name not in COMMANDS:
        hint = suggest(name, COMMANDS)
        raise ConfigError(f"command: expected one of {', '.join(COMMANDS)}, got {name!r}{hint}")
    return COMMANDS[name].run(arguments)


def _usage() -> str:
    rows = [f"  {name:<16}{command.help}" for name, command in COMMANDS.items()]
    head = "Usage: fastdeploy-sd COMMAND [ARGUMENT...]\n\nCommands:"
    return "\n".join([head, *rows, "", "fastdeploy-sd COMMAND --help tells more about one."])


def _serve(argv: Sequence[str]) -> int:
    from fastdeploy_sd.entrypoints.openai import api_server

    return api_server.main(argv, "fastdeploy-sd serve")


def _route(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cluster.router import launch

    return launch.main(argv, "fastdeploy-sd route")


def _chat(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli import client

    return client.chat(argv)


def _complete(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli import client

    return client.complete(argv)


def _explain_config(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli import inspection

    return inspection.explain_config(argv)


def _collect_env(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli import inspection

    return inspection.collect_env(argv)


def _replay(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli.replay import command as replay

    return replay.main(argv)


def _perplexity(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli.perplexity import command as perplexity

    return perplexity.main(argv)


def _verify(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli.verify import command as verify

    return verify.main(argv)


def _quantize(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli import quantize

    return quantize.main(argv)


def _drafter(argv: Sequence[str]) -> int:
    from fastdeploy_sd.cli import drafter

    return drafter.main(argv)


COMMANDS = {
    "serve": Command("serve a model over the OpenAI API", _serve),
    "route": Command("give requests to several servers, and go on elsewhere when one fails", _route),
    "chat": Command("talk to a running server", _chat),
    "complete": Command("let a running server continue a text", _complete),
    "replay": Command("count what drafting would have gained on recorded texts; needs no model", _replay),
    "perplexity": Command("score a text under a model, and compare two formats of it", _perplexity),
    "verify": Command("prove on your model that tokens do not depend on how they are computed", _verify),
    "quantize": Command("write a checkpoint whose weights are quantised already", _quantize),
    "drafter": Command("prepare a draft model", _drafter),
    "explain-config": Command("print the effective options and where each came from", _explain_config),
    "collect-env": Command("print versions and hardware, for bug reports", _collect_env),
}
