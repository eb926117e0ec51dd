"""`python -m fastdeploy_sd.entrypoints.openai.api_server --model PATH ...`: the server, from its command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fastdeploy_sd.config import load_configs, verify_keys_are_known
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process.child import configure_logging

_EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None, prog: str = "api_server") -> int:
    """Serve the options of `argv`, None = this process's, until told to stop.

    Returns:
        The exit status: 0 after an orderly stop, 2 for a wrong option or checkpoint, 1 when the engine failed.
    """
    try:
        configure_logging("server")  # before the configuration, which logs what has no effect
        configs = load_configs(sys.argv[1:] if argv is None else argv, prog)
        verify_keys_are_known(os.environ, bool(configs[0].server.api_key))
        from fastdeploy_sd.entrypoints import launch  # only now: --help and wrong options are answered at once
        from fastdeploy_sd.hub import located

        configs = tuple(map(located, configs))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return _EXIT_USAGE
    return launch.run(configs)


if __name__ == "__main__":
    sys.exit(main())
