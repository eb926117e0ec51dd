"""`python -m benchmarks COMMAND`: offline, http, speculation, kernels, gpu-kernels, adapters, experts, host, compare,
peers, checkpoint, cluster.

A YAML file in place of the command is `offline --config FILE`.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Mapping, Sequence

from fastdeploy_sd.errors import ConfigError, FdsdError, suggest

# Command -> module and function, imported when it is run: most bring in Paddle. It takes the arguments, returns the
# exit status, and raises ConfigError for wrong options and other FdsdErrors for a run that failed.
COMMANDS: Mapping[str, str] = {
    "offline": "offline.main",
    "http": "load.main",
    "speculation": "speculation.main",
    "kernels": "kernels.main",
    "gpu-kernels": "gpu_kernels.main",
    "adapters": "adapters.main",
    "experts": "experts.main",
    "host": "host.main",
    "compare": "compare.main",
    "peers": "peers.commands.main",
    "checkpoint": "checkpoint.main",
    "cluster": "cluster.commands.main",
}
_WRONG_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status: 0, 1 for a failed run, 2 for wrong options."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", argv)
    if name in ("-h", "--help"):
        print(f"{__doc__}\nEvery command has --help.")
        return 0
    if name.endswith((".yaml", ".yml")):
        name, rest = "offline", ["--config", *argv]
    try:
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise ConfigError(f"command: expected one of {known} or a YAML file, got {name!r}{suggest(name, COMMANDS)}")
        module, _, function = COMMANDS[name].rpartition(".")
        status: int = getattr(importlib.import_module(f"benchmarks.{module}"), function)(rest)
        return status
    except FdsdError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return _WRONG_USAGE if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    # As after Ctrl-C, servers that a command started are ended with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
