#!/bin/sh
# Print the id of the Redis that start_redis.sh started in this folder; 1 when it does not run or does not answer:
#   scripts/deploy/redis_pid.sh [RUN_DIR, default run/redis]
# Only a Redis that takes the password and has the process id of the folder counts: another one may have the port.
set -eu

run_dir=${1:-${RUN_DIR:-run/redis}}
pid=$("$(dirname "$0")/pid.sh" "$run_dir") || exit 1
port=$(sed -n 's/^port //p' "$run_dir/redis.conf")
password=$(cat "$run_dir/password")
# The password goes through a pipe: a command line is public. A Redis without a password answers AUTH with an error.
answer=$(printf 'AUTH %s\nINFO server\n' "$password" | timeout 5 redis-cli -h 127.0.0.1 -p "$port" 2>/dev/null) || exit 1
[ "$(echo "$answer" | head -n 1 | tr -d '\r')" = OK ] || exit 1
echo "$answer" | tr -d '\r' | grep -qx "process_id:$pid" || exit 1
echo "$pid"
