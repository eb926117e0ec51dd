#!/bin/sh
# Everything that needs a GPU, in one call: see gpu_check.py. Makes .venv where there is none (nvcc comes from PATH,
# $NVCC or the package nvidia-cuda-nvcc).
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || scripts/dev setup
scripts/dev build >/dev/null
exec .venv/bin/python scripts/gpu_check.py "$@"
