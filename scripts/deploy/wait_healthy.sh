#!/bin/sh
# Wait until a server takes requests: scripts/deploy/wait_healthy.sh URL [SECONDS, default 900]; 1 when it does not. Needs curl.
set -eu

url=${1:?"usage: wait_healthy.sh URL [SECONDS]"}
left_s=${2:-900}
until curl --silent --fail --max-time 5 --output /dev/null "$url/health"; do
    left_s=$((left_s - 1))
    if [ "$left_s" -le 0 ]; then
        echo "wait_healthy.sh: $url does not answer 200 on /health" >&2
        exit 1
    fi
    sleep 1
done
