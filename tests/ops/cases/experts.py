"""Cases of dispatch_experts, and of combine_experts after it on a rank alone; several ranks are in test_experts.py."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.device_tensor import dtype_name
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.ops import experts as ops
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.reference import experts as reference
from tests.ops.cases.case import OpCases
from tests.ops.cases.moe import MOE_FFN, sum_of_the_chosen
from tests.ops.cuda_device import running_device
from tests.ops.expert_model import Gpu, Layer, linear_placement, pack_experts, ranks_of

_NAMES = (
    *("float32-no-token", "wint8-all-experts", "wint4-many-experts", "float32-4-slices", "float32-groups"),
    *("bfloat16-clamped", "float32-shared", "bfloat16-shared-bf16", "float32-logit-bias"),
)
_OF_EXPERTS = ("gate_up", "down", "fmt", "gate_up_bias", "down_bias", "gate_limit", "shared", "num_slices", "out_dtype")
CASES = {name: MOE_FFN.inputs[name] for name in _NAMES}
ROUTED = {name: {k: v for k, v in case.items() if k not in _OF_EXPERTS} for name, case in CASES.items()}


def choose(x: Any, router_weight: Any, **options: Any) -> Any:
    return ops.dispatch_experts(x, router_weight, None, 0, **options)


def run_layer(service: ExpertService, x: Any, router_weight: Any, index: int = 0, **options: Any) -> Any:
    """Both ops, one after the other."""
    of_pass = {name: options.pop(name) for name in ("part", "num_parts") if name in options}
    of_sum = {name: options.pop(name) for name in ("num_slices", "shared", "out_dtype", "is_last") if name in options}
    ids, weights = ops.dispatch_experts(x, router_weight, service, index, **of_pass, **options)
    return ops.combine_experts(x, ids, weights, service, index, **of_pass, **of_sum)


def run_alone(x: Any, router_weight: Any, gate_up: Any, down: Any, fmt: Any, **options: Any) -> Any:
    """On a rank that has all experts, at most four tokens at a time."""
    biases = options.pop("gate_up_bias", None), options.pop("down_bias", None)
    weight = router_weight.numpy() if hasattr(router_weight, "numpy") else router_weight
    packed = pack_experts(gate_up, fmt), pack_experts(down, fmt)
    layer = Layer(weight, *packed, {"top_k": options["top_k"]}, biases, options.pop("gate_limit", None))
    found = running_device()
    gpu = None if found is None else Gpu(found.library, found.stream, found.transfers.on_wait)
    with ranks_of([layer], linear_placement(len(weight), 1), storage(dtype_name(x.dtype)), 4, gpu=gpu) as ranks:
        return run_layer(ranks.services[0], x, router_weight, **options)


DISPATCH_EXPERTS = OpCases(
    "dispatch_experts", choose, reference.dispatch_experts, ROUTED, ops.DISPATCH_EXPERTS, rtol=1e-5, atol=1e-6
)
COMBINE_EXPERTS = OpCases(
    "combine_experts",
    run_alone,
    sum_of_the_chosen,
    CASES,
    ops.COMBINE_EXPERTS,
    on_host={"gate_up", "down", "gate_up_bias", "down_bias"},
    rtol=1e-5,
    atol=1e-5,
)
