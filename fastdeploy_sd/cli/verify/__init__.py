"""Proof by running: a request's tokens and log-probabilities do not depend on how they were computed, bit for bit.

The same requests run alone with plain decoding, then by every method in every way an engine can run them; answers are
compared exactly. `fastdeploy-sd verify` does it on a user's model, the tests on tiny ones. Knows engines from outside
only: no model, no kernel, no text.
"""

from __future__ import annotations

from fastdeploy_sd.cli.verify.answers import Answer, Difference, compare
from fastdeploy_sd.cli.verify.matrix import Cell, Matrix, run_cell, run_matrix
from fastdeploy_sd.cli.verify.methods import METHOD_NAMES, PLAIN, Method, standard_methods
from fastdeploy_sd.cli.verify.requests import SAMPLINGS, USUAL_LENGTHS, Lengths, make_requests
from fastdeploy_sd.cli.verify.runs import (
    Reference,
    available_methods,
    make_reference,
    open_engine,
    run,
    run_alone,
    runnable_variants,
)
from fastdeploy_sd.cli.verify.variants import ALONE, EngineVariant, all_variants, quick_variants

__all__ = [
    "ALONE",
    "METHOD_NAMES",
    "PLAIN",
    "SAMPLINGS",
    "USUAL_LENGTHS",
    "Answer",
    "Cell",
    "Difference",
    "EngineVariant",
    "Lengths",
    "Matrix",
    "Method",
    "Reference",
    "all_variants",
    "available_methods",
    "compare",
    "make_reference",
    "make_requests",
    "open_engine",
    "quick_variants",
    "run",
    "run_alone",
    "run_cell",
    "run_matrix",
    "runnable_variants",
    "standard_methods",
]
