#!/bin/sh
# Stop what start_1p1d.sh started, the router first; running requests may finish: scripts/deploy/stop_1p1d.sh
# RUN_DIR as for start_1p1d.sh, STOP_TIMEOUT_S as for stop.sh. Exit status: 0 all have ended, 1 one had to be killed, or
# Redis does not answer.
set -eu

run_dir=${RUN_DIR:-run}
here=$(cd "$(dirname "$0")" && pwd)
status=0
for part in router decode prefill; do
    [ ! -f "$run_dir/$part/server.pid" ] || RUN_DIR=$run_dir/$part "$here/stop.sh" || status=1
done
RUN_DIR=$run_dir/redis "$here/stop_redis.sh" || status=1
exit "$status"
