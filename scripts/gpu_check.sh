#!/bin/sh
# Everything that needs a GPU, in one call: see gpu_check.py. Makes .venv where there is none (nvcc comes from PATH,
# $NVCC or the package nvidia-cuda-nvcc); $PYTHON is taken as it is, and nothing is fetched.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    [ -x "$PYTHON" ] || scripts/dev setup
fi
"$PYTHON" scripts/kernel_build.py >/dev/null
exec "$PYTHON" scripts/gpu_check.py "$@"
