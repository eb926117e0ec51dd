#!/bin/sh
# Print the id of the server or Redis that start.sh or start_redis.sh started in this folder; 1 when it does not run:
#   scripts/deploy/pid.sh [RUN_DIR]
set -eu

file=${1:-${RUN_DIR:-run}}/server.pid
[ -f "$file" ] || exit 1
pid=$(cat "$file")
# The number may have gone to another program since.
{ tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -q 'fastdeploy_sd\|redis-server' || exit 1
echo "$pid"
