"""Print a ready-to-paste request as soon as the server that is starting answers; part of `scripts/dev serve`.

Usage: python scripts/announce.py SERVER_PID [SERVER_OPTION...]

Takes the server's own options, so the address, the model's name and the need for a key are the real ones. Ends quietly
when the server's process is gone.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time

import httpx

from fastdeploy_sd.config import Config, load_config
from fastdeploy_sd.errors import ConfigError

POLL_INTERVAL_S = 0.25
PROMPT = "Complete this function:\ndef read_lines(path, encoding='utf-8'):\n"
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def base_url(config: Config) -> str:
    """Return the URL under which this machine reaches the server."""
    host = _EVERY_ADDRESS.get(config.server.host, config.server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def example_request(config: Config) -> str:
    """Return a shell command that streams a completion; the key is left for the reader to fill in."""
    body = {
        "model": config.model.served_name,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
    }
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if config.server.api_key else ""
    return (
        f"curl -N {base_url(config)}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n"
        f"{key}  -d {shlex.quote(json.dumps(body))}"
    )


def wait_until_up(url: str, pid: int) -> bool:
    """Return True once /health answers 200, False when process `pid` has ended."""
    while _is_running(pid):
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            pass
        time.sleep(POLL_INTERVAL_S)
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(argv: list[str]) -> int:
    logging.disable(logging.WARNING)  # the server itself says what has no effect
    try:
        config = load_config(argv[1:])
    except (ConfigError, SystemExit):
        return 0  # the server itself reports it
    if config.server.port != 0 and wait_until_up(base_url(config), int(argv[0])):
        print(f"\nThe server is up. Try, in another terminal:\n\n{example_request(config)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
