#!/bin/sh
# Stop the Redis that start_redis.sh started in RUN_DIR (default: run/redis), if it runs: scripts/deploy/stop_redis.sh
# Exit status: 0 it has ended, 1 it still answers.
set -eu

conf=${RUN_DIR:-run/redis}/redis.conf
[ -f "$conf" ] || exit 0
port=$(sed -n 's/^port //p' "$conf")
password=$(sed -n 's/^requirepass //p' "$conf")
# Another Redis on this port has another password, and does not listen to this.
REDISCLI_AUTH=$password redis-cli -h 127.0.0.1 -p "$port" shutdown nosave >/dev/null 2>&1 || true
if REDISCLI_AUTH=$password redis-cli -h 127.0.0.1 -p "$port" ping 2>/dev/null | grep -q PONG; then
    echo "stop_redis.sh: Redis on port $port did not end" >&2
    exit 1
fi
rm -f "$conf" "${conf%redis.conf}password"
