#!/bin/sh
# Start a Redis for servers of this machine, in memory only, and print the name of the file with its password, for
# --scheduler-password-file: scripts/deploy/start_redis.sh
# RUN_DIR (default: run/redis) gets server.pid, console.log, and, for this user's eyes only, password and redis.conf.
# REDIS_PORT (default: 6379) is its port of 127.0.0.1. Needs redis-server and redis-cli.
# Exit status: 0 it answers, 2 it does not; another program on the port is left alone.
set -eu

run_dir=${RUN_DIR:-run/redis}
port=${REDIS_PORT:-6379}
here=$(cd "$(dirname "$0")" && pwd)

for program in redis-server redis-cli; do
    if ! command -v "$program" >/dev/null; then
        echo "start_redis.sh: expected $program on PATH, found none; install Redis" >&2
        exit 2
    fi
done
mkdir -p "$run_dir"
if pid=$("$here/pid.sh" "$run_dir"); then
    echo "start_redis.sh: a Redis runs already: process $pid of $run_dir" >&2
    exit 2
fi
umask 077
password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
rm -f "$run_dir/redis.conf" "$run_dir/password"
echo "$password" >"$run_dir/password"
cat >"$run_dir/redis.conf" <<CONF
bind 127.0.0.1
port $port
requirepass $password
save ""
appendonly no
maxmemory 256mb
maxmemory-policy noeviction
CONF
# Made here: the child opens it at its own time, which may be after it is read below.
: >"$run_dir/console.log"
# It runs in its folder, so that the name of the folder needs no quoting in the configuration.
(cd "$run_dir" && exec nohup redis-server ./redis.conf >>console.log 2>&1 </dev/null) &
pid=$!
echo "$pid" >"$run_dir/server.pid"
left=100
until "$here/redis_pid.sh" "$run_dir" >/dev/null; do
    left=$((left - 1))
    # An ended child stays in the process table until it is waited for.
    if [ "$left" -le 0 ] || ! [ -d "/proc/$pid" ] || grep -q '^State:[[:space:]]*Z' "/proc/$pid/status"; then
        cat "$run_dir/console.log" >&2
        reason="Redis does not answer on 127.0.0.1:$port"
        ! grep -q 'Address already in use' "$run_dir/console.log" ||
            reason="port $port of 127.0.0.1 belongs to another program, which is left alone; REDIS_PORT names another port"
        echo "start_redis.sh: $reason" >&2
        kill "$pid" 2>/dev/null || true
        rm -f "$run_dir/redis.conf" "$run_dir/password" "$run_dir/server.pid"
        exit 2
    fi
    sleep 0.1
done
echo "$run_dir/password"
