import numpy as np
import numpy.typing as npt
from paddle import Tensor, dtype

def frombuffer(buffer: npt.NDArray[np.generic], dtype: dtype) -> Tensor: ...
