"""One rank of those that share experts, with a GPU of its own, in a process without Paddle; see expert_rank_process.py.

Usage: python -m tests.ops.gpu_expert_process FD RANK SIZE TIMEOUT_S

$FDSD_CUDA_LIBRARY names the library, and the rank's number is its GPU's.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device import library as host_library
from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import Allocator, CudaMemory
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.types import F32
from tests.ops.expert_model import Gpu, Layer, Ranks, linear_placement, random_layer
from tests.ops.rank_process import digest, serve

NUM_EXPERTS, HIDDEN, INNER = 7, 40, 24
# Rows of a job: passes of more go in rounds.
MAX_TOKENS = 4


def layers() -> list[Layer]:
    biased = random_layer(61, (NUM_EXPERTS, HIDDEN, INNER), "wint8", top_k=3, has_bias=True, gate_limit=1.5)
    return [random_layer(60, (NUM_EXPERTS, HIDDEN, INNER), "bfloat16", top_k=3), biased]


def tokens(seed: int, count: int) -> F32:
    x: F32 = np.random.default_rng(seed).standard_normal((count, HIDDEN), np.float32)
    return x


class GpuRank:
    """A rank, its GPU and its stream."""

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        library = CudaLibrary(pathlib.Path(os.environ["FDSD_CUDA_LIBRARY"]))
        library.call("use_device", ctypes.c_int32(rank))
        self.gpu, self.layers = Gpu(library, library.made("stream_create")), layers()
        placement = linear_placement(NUM_EXPERTS, size)
        ranks = Ranks(self.layers, placement, np.float32, MAX_TOKENS, timeout_s, fd, gpu=self.gpu)
        self.service: ExpertService = ranks.open(rank)
        self._routers = [self.gpu.place(layer.router_weight) for layer in self.layers]

    def run(self, seed: int, count: int, times: int, parts: Sequence[int] = (0, 1)) -> str:
        """Passes whose layers feed one another; what to compare results by, or the last one's numbers for a part."""
        found = []
        for p in range(times):
            x = tokens(seed + p, count)
            for i, layer in enumerate(self.layers):
                x = self._run_layer(x, i, layer, parts)
                if parts[1] > 1:
                    return x.tobytes().hex()
            found.append(x)
        return digest(np.concatenate(found))

    def _run_layer(self, x: F32, index: int, layer: Layer, parts: Sequence[int]) -> F32:
        count, top_k = len(x), layer.routing["top_k"]
        y = np.empty_like(x)
        ids: np.ndarray = np.empty((2, count, top_k), np.int32)
        on_gpu = {name: self.gpu.place(array) for name, array in {"x": x, "y": y, "ids": ids[0], "w": ids[1]}.items()}
        common = {"service": self.service.handle, "layer": index, "num_tokens": count, "hidden_size": HIDDEN}
        common |= {"part": parts[0], "num_parts": parts[1], "x": on_gpu["x"], "top_k": top_k}
        common |= {"expert_ids": on_gpu["ids"], "weights": on_gpu["w"]}
        router = {"router_weight": self._routers[index], "normalize": 1, "norm_min": 1e-12, "scale": 1.0}
        router |= {"num_groups": 1, "num_chosen_groups": 1, "num_experts": NUM_EXPERTS}
        self._launch("dispatch_experts", struct_type("DispatchExpertsParams")(**common, **router))
        self._launch("combine_experts", struct_type("CombineExpertsParams")(**common, num_slices=1, y=on_gpu["y"]))
        self.gpu.library.call("stream_synchronize", self.gpu.stream)
        for verify in self.gpu.on_wait:
            verify()
        self.gpu.library.call("copy", address(y), on_gpu["y"], ctypes.c_int64(y.nbytes))
        return y

    def _launch(self, op: str, params: Any) -> None:
        library = self.gpu.library
        num_bytes = library.number(f"{op}_workspace_bytes", ctypes.byref(params))
        memory, workspace = CudaMemory(Allocator(library)).take(max(num_bytes, 1))
        self.gpu.kept.append(memory)
        library.launch(op, params, workspace, self.gpu.stream)

    def follow(self, order: str, arguments: dict[str, Any]) -> Any:
        """Do one thing and return the answer."""
        service = self.service
        orders: dict[str, Callable[..., Any]] = {
            "meet": lambda: service.wait_until_all_serve(60),
            "gone": service.mark_gone,
            "abort": service.abort,
            "lost": lambda: service.has_lost_experts,
            "counts": lambda: service.counts().tolist(),
            "close": service.close,
            "run": self.run,
        }
        return orders[order](**arguments)


def main() -> int:
    fd, rank, size = map(int, sys.argv[1:4])
    host_library.set_num_threads(1)
    own = GpuRank(fd, rank, size, float(sys.argv[4]))
    print(json.dumps(own.service.incarnation), flush=True)
    serve(own.follow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
