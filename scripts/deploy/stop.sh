#!/bin/sh
# Stop the server that start.sh started; its running requests may finish first: scripts/deploy/stop.sh
# RUN_DIR as for start.sh. STOP_TIMEOUT_S (default: 90) should be longer than --timeout-graceful-shutdown; then it is killed.
# Exit status: 0 it has ended (or did not run), 1 it had to be killed.
set -eu

run_dir=${RUN_DIR:-run}
here=$(cd "$(dirname "$0")" && pwd)
if ! pid=$("$here/pid.sh" "$run_dir"); then
    echo "stop.sh: no server runs in $run_dir" >&2
    rm -f "$run_dir/server.pid" "$run_dir/url"
    exit 0
fi
kill -TERM "$pid"
waited_s=0
status=0
while "$here/pid.sh" "$run_dir" >/dev/null; do
    if [ "$waited_s" -ge "${STOP_TIMEOUT_S:-90}" ]; then
        echo "stop.sh: process $pid did not end after $waited_s s; killing it" >&2
        kill -KILL "$pid"
        status=1
        break
    fi
    sleep 1
    waited_s=$((waited_s + 1))
done
rm -f "$run_dir/server.pid" "$run_dir/url"
exit "$status"
