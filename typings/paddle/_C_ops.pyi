from collections.abc import Sequence
from typing import Any

from paddle import CPUPlace, CUDAPlace, Tensor, dtype

def _run_custom_op(name: str, *args: Any) -> list[Tensor]: ...
def empty(shape: Sequence[int], dtype: dtype, place: CPUPlace | CUDAPlace) -> Tensor: ...
