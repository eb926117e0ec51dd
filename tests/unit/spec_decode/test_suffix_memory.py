"""A shared cache whose memory ran out in the middle of an append can still be read and saved."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource

import numpy as np

from fastdeploy_sd.spec_decode.methods.suffix_drafter import SuffixDrafter, SuffixLimits, SuffixRule, SuffixSequences

token_ids = np.random.default_rng(0).integers(0, 1000, 400_000).astype(np.int32)
texts = SuffixSequences(np.zeros((1, 16), np.uint8), np.array([0, len(token_ids)]), token_ids)
drafter = SuffixDrafter(1, 1000, SuffixRule(), SuffixLimits(-1, 1 << 30))
with open("/proc/self/statm") as file:
    num_bytes = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (num_bytes + (8 << 20), resource.RLIM_INFINITY))
try:
    drafter.import_sequences(texts)
except ValueError as error:
    assert "memory: expected room" in str(error), error
else:
    raise AssertionError("the memory was enough")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
stats = drafter.stats()
assert 1000 < stats.num_tokens < len(token_ids), stats.num_tokens
assert (stats.num_outputs, stats.num_sequences) == (1, 1)
exported = drafter.export_sequences()
assert exported.cu_tokens.tolist() == [0, stats.num_tokens]
assert (exported.token_ids == token_ids[: stats.num_tokens]).all()
"""


def test_what_was_read_before_memory_ran_out_is_exported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
