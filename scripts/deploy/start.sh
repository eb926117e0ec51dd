#!/bin/sh
# Start a server in the background and return when it answers: scripts/deploy/start.sh [SERVE OPTION...]
# On another host than the first of --ips it returns when that host's ranks run.
# RUN_DIR (default: run) gets server.pid, url, console.log (since this start) and, unless FD_LOG_DIR says where, log/.
# START_TIMEOUT_S (default: 900) is how long loading may take. FDSD_PYTHON names the interpreter that has fastdeploy_sd.
# SERVER_MODULE (default: fastdeploy_sd.entrypoints.openai.api_server) may be fastdeploy_sd.cluster.router.launch: it returns when
# the router can be reached, which is healthy with its first instance.
# Exit status: 0 serving, 1 not within the time, 2 refused; the reason is on standard error.
set -eu

run_dir=${RUN_DIR:-run}
timeout_s=${START_TIMEOUT_S:-900}
here=$(cd "$(dirname "$0")" && pwd)
python=${FDSD_PYTHON:-$here/../../.venv/bin/python}
[ -x "$python" ] || python=python3

mkdir -p "$run_dir"
if pid=$("$here/pid.sh" "$run_dir"); then
    echo "start.sh: a server runs already: process $pid of $run_dir" >&2
    exit 2
fi
export FD_LOG_DIR="${FD_LOG_DIR:-$run_dir/log}"
# Made here: the child opens it at its own time, which may be after the first look below.
: >"$run_dir/console.log"
nohup "$python" -m "${SERVER_MODULE:-fastdeploy_sd.entrypoints.openai.api_server}" "$@" >>"$run_dir/console.log" 2>&1 </dev/null &
pid=$!
echo "$pid" >"$run_dir/server.pid"

waited_s=0
while :; do
    # An ended child stays in the process table until it is waited for.
    if ! [ -d "/proc/$pid" ] || grep -q '^State:[[:space:]]*Z' "/proc/$pid/status"; then
        status=0
        wait "$pid" || status=$?
        rm -f "$run_dir/server.pid"
        cat "$run_dir/console.log" >&2
        exit "$status"
    fi
    url=$(sed -n 's/.* serving .* on \(http:[^ ]*\)$/\1/p' "$run_dir/console.log")
    router_url=$(sed -n 's/.* routing on \(http:[^ ]*\)$/\1/p' "$run_dir/console.log")
    if [ -n "$router_url" ] || { [ -n "$url" ] && "$here/wait_healthy.sh" "$url" 1 2>/dev/null; }; then
        url=${url:-$router_url}
        echo "$url" >"$run_dir/url"
        echo "$url"
        exit 0
    fi
    # Another host of several serves nothing itself.
    node=$(sed -n 's/.* \(node [0-9]* runs rank .*\)$/\1/p' "$run_dir/console.log")
    if [ -n "$node" ]; then
        echo "$node"
        exit 0
    fi
    if [ "$waited_s" -ge "$timeout_s" ]; then
        echo "start.sh: process $pid does not answer after $timeout_s s; see $run_dir/console.log, or stop it" >&2
        exit 1
    fi
    sleep 1
    waited_s=$((waited_s + 1))
done
