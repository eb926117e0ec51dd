#!/bin/sh
# Stop the Redis that start_redis.sh started in RUN_DIR (default: run/redis), if it runs: scripts/deploy/stop_redis.sh
# It is asked first whether it is that one; any other is left alone.
# Exit status: 0 it has ended or did not run, 1 it does not answer or had to be killed.
set -eu

run_dir=${RUN_DIR:-run/redis}
here=$(cd "$(dirname "$0")" && pwd)
status=0
if pid=$("$here/pid.sh" "$run_dir"); then
    if ! "$here/redis_pid.sh" "$run_dir" >/dev/null; then
        echo "stop_redis.sh: process $pid does not answer as the Redis of $run_dir; it is left alone" >&2
        exit 1
    fi
    RUN_DIR=$run_dir "$here/stop.sh" || status=1
fi
rm -f "$run_dir/server.pid" "$run_dir/redis.conf" "$run_dir/password"
exit "$status"
