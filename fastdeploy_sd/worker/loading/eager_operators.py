"""The Paddle operators. Only eager execution calls them; the kernel library replays recordings without them."""

from __future__ import annotations

from fastdeploy_sd.device.program import paddle_ops
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.operators import declared_ops


def load_operators() -> None:
    """Load them.

    Raises:
        ConfigError: they cannot be built here.
    """
    try:
        paddle_ops.load(declared_ops())
    except ConfigError as error:
        raise ConfigError(f"enforce_eager: {error.message}", param="enforce_eager") from None
