"""Imports Paddle, and undoes its side effects on the process. Imported before any other module that needs it.

Where it is not installed, its names stand in: a GPU needs no more (device/without_paddle).

Paddle takes over the root logger, writes a banner at SIGTERM, and recommends ccache. None of
these helps users of a model. A program that has imported Paddle itself keeps its settings.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import logging
import pathlib
import signal
import sys
import warnings

from fastdeploy_sd import device


def _import_paddle() -> None:
    root = logging.getLogger()
    handlers, level, on_term = root.handlers[:], root.level, signal.getsignal(signal.SIGTERM)
    warnings.filterwarnings("ignore", "No ccache found")
    if importlib.util.find_spec("paddle") is None:
        sys.path.append(str(pathlib.Path(device.__file__).with_name("without_paddle")))

    import paddle
    import paddle.utils.cpp_extension  # the part that takes over the root logger

    root.handlers[:] = handlers
    root.setLevel(level)
    # Gives every signal its default action, so that SIGTERM just ends the process; crashes then show Python's stacks.
    paddle.disable_signal_handler()
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # no standard error to write to
            faulthandler.enable()
    with contextlib.suppress(ValueError, TypeError):  # not the main thread; not a handler that Python has set
        signal.signal(signal.SIGTERM, on_term)


if "paddle" not in sys.modules:
    _import_paddle()
