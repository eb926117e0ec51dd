#!/bin/sh
# Start a Redis for servers of this machine, in memory only, and print the name of the file with its password, for
# --scheduler-password-file: scripts/deploy/start_redis.sh
# RUN_DIR (default: run/redis) gets password and redis.conf, which only this user can read, and console.log. REDIS_PORT
# (default: 6379) is its port of 127.0.0.1. Needs redis-server and redis-cli. Exit status: 0 it answers, 2 it does not.
set -eu

run_dir=${RUN_DIR:-run/redis}
port=${REDIS_PORT:-6379}
mkdir -p "$run_dir"
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
dir $run_dir
CONF
# Made here: the child opens it at its own time, which may be after it is read below.
: >"$run_dir/console.log"
nohup redis-server "$run_dir/redis.conf" >>"$run_dir/console.log" 2>&1 </dev/null &
pid=$!
left=100
# What answers must be the one just started, not another one on this port: that one has another password.
until REDISCLI_AUTH=$password redis-cli -h 127.0.0.1 -p "$port" ping 2>/dev/null | grep -q PONG; do
    left=$((left - 1))
    if [ "$left" -le 0 ] || ! kill -0 "$pid" 2>/dev/null; then
        cat "$run_dir/console.log" >&2
        echo "start_redis.sh: Redis does not answer on 127.0.0.1:$port" >&2
        kill "$pid" 2>/dev/null || true
        rm -f "$run_dir/redis.conf" "$run_dir/password"
        exit 2
    fi
    sleep 0.1
done
echo "$run_dir/password"
