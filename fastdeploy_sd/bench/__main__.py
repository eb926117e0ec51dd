"""`python -m fastdeploy_sd.bench COMMAND`: offline, http, latency, attacks, suite (the default), forward, host,
speculation, drafters, edits, sampling, kernels, table, compare.

A YAML file in place of the command is `offline --config FILE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fastdeploy_sd.errors import ConfigError, FdsdError, suggest

_WRONG_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status: 0, 1 for a failed run, 2 for wrong options."""
    try:
        return _run(list(argv))
    except FdsdError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return _WRONG_USAGE if isinstance(error, ConfigError) else 1


def _run(argv: list[str]) -> int:
    name = argv[0] if argv else "suite"
    if name in ("-h", "--help"):
        print(f"{__doc__}\nEvery command has --help.")
        return 0
    if name.endswith((".yaml", ".yml")):
        return _offline(["--config", *argv])
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ConfigError(f"command: expected one of {known} or a YAML file, got {name!r}{suggest(name, COMMANDS)}")
    return COMMANDS[name](argv[1:])


def _offline(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import offline

    return offline.main(argv)


def _http(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import load

    return load.main(argv)


def _latency(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import latency

    return latency.main(argv)


def _attacks(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import attacks

    return attacks.main(argv)


def _suite(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import suite

    return suite.main(argv)


def _forward(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import forward

    return forward.main(argv)


def _host(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import host

    return host.main(argv)


def _speculation(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import speculation

    return speculation.main(argv)


def _drafters(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import drafters

    return drafters.main(argv)


def _edits(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import edits

    return edits.main(argv)


def _kernels(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import kernels

    return kernels.main(argv)


def _sampling(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import sampling

    return sampling.main(argv)


def _table(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import report

    return report.table_command(argv)


def _compare(argv: Sequence[str]) -> int:
    from fastdeploy_sd.bench import report

    return report.compare_command(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "offline": _offline,
    "http": _http,
    "latency": _latency,
    "attacks": _attacks,
    "suite": _suite,
    "forward": _forward,
    "host": _host,
    "speculation": _speculation,
    "drafters": _drafters,
    "edits": _edits,
    "sampling": _sampling,
    "kernels": _kernels,
    "table": _table,
    "compare": _compare,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
