#!/bin/sh
# Start Redis, an instance that computes prompts, one that generates, and a router before them, in the background:
#   scripts/deploy/start_1p1d.sh [SERVE OPTION...]    e.g. demo --quantization wint8; both instances get the options
# Prints the router's address when it takes requests. RUN_DIR (default: run) gets redis/, prefill/, decode/ and router/, each
# as start.sh makes it. PORT (8000), PREFILL_PORT (8180), DECODE_PORT (8190) and REDIS_PORT (6379) are the ports, all of
# 127.0.0.1; one that is in use is an error before anything starts. Exit status as of start.sh; nothing is left running
# unless it is 0.
set -eu

run_dir=${RUN_DIR:-run}
redis_port=${REDIS_PORT:-6379}
here=$(cd "$(dirname "$0")" && pwd)
python=${FDSD_PYTHON:-$here/../../.venv/bin/python}
[ -x "$python" ] || python=python3
for part in redis prefill decode router; do
    if pid=$("$here/pid.sh" "$run_dir/$part"); then
        echo "start_1p1d.sh: $part runs already: process $pid of $run_dir/$part" >&2
        exit 2
    fi
done
"$python" - "PORT=${PORT:-8000}" "PREFILL_PORT=${PREFILL_PORT:-8180}" "DECODE_PORT=${DECODE_PORT:-8190}" \
    "REDIS_PORT=$redis_port" <<'PY' || exit 2
import socket, sys

held = []  # until all are: two names for one port are found, too
for setting in sys.argv[1:]:
    name, _, port = setting.partition("=")
    try:
        assert 0 < int(port) < 65536, "a port is in 1..65535"
        held.append(socket.create_server(("127.0.0.1", int(port))))
    except (AssertionError, OSError, ValueError) as error:
        sys.exit(f"start_1p1d.sh: {name}: expected a free port of 127.0.0.1, got {port}: {error}")
PY
# Another signal must not end the stopping half-way.
trap 'trap "" INT TERM HUP; "$here/stop_1p1d.sh" 2>/dev/null || true' EXIT
trap 'exit 1' INT TERM HUP

password_file=$(REDIS_PORT=$redis_port RUN_DIR=$run_dir/redis "$here/start_redis.sh")

# start PART PORT SERVE-OPTION...
start() {
    part=$1
    port=$2
    shift 2
    RUN_DIR=$run_dir/$part FD_LOG_DIR=$run_dir/$part/log "$here/start.sh" "$@" --port "$port"
}

for part in decode prefill; do  # a prefill instance is healthy when it has found the other one
    if [ "$part" = prefill ]; then port=${PREFILL_PORT:-8180}; else port=${DECODE_PORT:-8190}; fi
    start "$part" "$port" "$@" --splitwise-role "$part" --router "127.0.0.1:${PORT:-8000}" --scheduler-name splitwise \
        --scheduler-host 127.0.0.1 --scheduler-port "$redis_port" --scheduler-password-file "$password_file" >/dev/null
done
url=$(SERVER_MODULE=fastdeploy_sd.cluster.router.launch start router "${PORT:-8000}" --splitwise)
left_s=10
until [ "$(curl --silent "$url/metrics" | grep -c '^fastdeploy_sd:router_instances{.*state="available"} [1-9]')" = 2 ]; do
    left_s=$((left_s - 1))
    if [ "$left_s" -le 0 ]; then
        echo "start_1p1d.sh: the instances have not registered with the router at $url" >&2
        exit 1
    fi
    sleep 1
done
echo "$url"
trap - EXIT
