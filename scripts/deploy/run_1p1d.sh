#!/bin/sh
# Run what start_1p1d.sh starts until a signal (Ctrl-C, SIGTERM, SIGHUP) or until a part of it ends; then stop all of it:
#   scripts/deploy/run_1p1d.sh [SERVE OPTION...]
# Prints the router's address when it takes requests. Ports as for start_1p1d.sh. RUN_DIR (default: a temporary folder that is
# removed at the end) holds the logs. Exit status: 0 after a signal, 1 when a part ended, else as of start_1p1d.sh.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
temporary=
[ -n "${RUN_DIR:-}" ] || { RUN_DIR=$(mktemp -d) && temporary=$RUN_DIR; }
export RUN_DIR
# Another signal must not end the stopping half-way.
trap 'trap "" INT TERM HUP; "$here/stop_1p1d.sh" 2>/dev/null; [ -z "$temporary" ] || rm -rf "$temporary"' EXIT
trap 'exit 0' INT TERM HUP
echo "run_1p1d.sh: starting Redis, a prefill instance, a decode instance and a router; logs are in $RUN_DIR" >&2
url=$("$here/start_1p1d.sh" "$@")
echo "$url"
echo "run_1p1d.sh: the router takes requests; try
  curl $url/v1/completions -d '{\"prompt\": \"def add(a, b):\", \"max_tokens\": 40, \"temperature\": 0}'" >&2
while :; do
    sleep 1 &
    wait $!
    for part in redis prefill decode router; do
        if ! "$here/pid.sh" "$RUN_DIR/$part" >/dev/null; then
            echo "run_1p1d.sh: error: $part has ended, so all parts are stopped; the last lines of its log:" >&2
            tail -n 5 "$RUN_DIR/$part/console.log" >&2
            exit 1
        fi
    done
done
