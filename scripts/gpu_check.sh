#!/bin/sh
# Everything that needs a GPU, in stages: see gpu_check.py. Makes .venv where there is none: with what development needs,
# or of the wheels in $WHEELS. $PYTHON is taken as it is, and nothing is fetched.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    if [ ! -x "$PYTHON" ] && [ -n "${WHEELS:-}" ]; then
        python3 -m venv --system-site-packages .venv
    fi
    [ -x "$PYTHON" ] || scripts/dev setup
fi
"$PYTHON" scripts/kernel_build.py >/dev/null
exec "$PYTHON" scripts/gpu_check.py "$@"
