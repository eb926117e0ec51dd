"""Whether drafting pays. The kernel library tells; see regression_detector.h in custom_ops/cpu/drafters."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, library
from fastdeploy_sd.device.program.bound_call import BoundCall

# What drafts must be expected to bring where none have lost: the least of the native guard's demands.
LEAST_DEMAND = 1.03


class RegressionDetector:
    """Told of every step, asked before the next one; in a server by OnlineEstimator, in native code.

    Attributes:
        handle: of the native object.
    """

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("regression_create", struct_type("RegressionCreateParams")(detector=ctypes.addressof(handle)))
        self.handle = handle
        weakref.finalize(self, library().fdsd_regression_destroy, handle)
        self._facts: Any = struct_type("RegressionFacts")()
        where = ctypes.addressof(self._facts)
        self._ask = BoundCall("regression_facts", struct_type("RegressionFactsParams")(detector=handle, facts=where))
        self._observe = BoundCall("regression_observe", struct_type("RegressionObserveParams")(detector=handle))

    @property
    def gain(self) -> float:
        """Tokens per second over those of plain steps, in the class of the latest step; 0 = not known yet."""
        return float(self._facts_of(0).gain)

    def observe(
        self,
        num_requests: int,
        num_tokens: int,
        num_drafts: int,
        seconds: float,
        *,
        asking_s: float = 0.0,
        slowdown_ratio: float = 1.0,
    ) -> None:
        """A step is over.

        Args:
            num_tokens: that it brought, of all requests; 0 = it cannot be compared: it had parts of prompts in it, or
                requests that came or went.
            num_drafts: that were in it.
            seconds: everything but what drafting took; > 0 where the step can be compared.
            asking_s: seconds that drafting took.
            stretch: expected time of the step over that of a plain one, >= 1.

        Raises:
            ValueError: a number is out of range.
        """
        params = self._observe.params
        params.num_requests, params.num_tokens, params.num_drafts = num_requests, num_tokens, num_drafts
        params.seconds, params.asking_s, params.slowdown_ratio = seconds, asking_s, slowdown_ratio
        self._observe.run()

    def is_worth_asking(self, num_requests: int) -> bool:
        """Whether asking in steps of so many requests has brought more lately than it took."""
        return bool(self._facts_of(num_requests).is_worth_asking)

    def least_gain(self, num_requests: int) -> float:
        """What drafts must be expected to bring in the next step of so many requests: 1 or more.

        Infinite where it is to be plain, as one is due, or because drafts lose whatever is expected of them.
        """
        return float(self._facts_of(num_requests).least_gain)

    def is_off(self, num_requests: int) -> bool:
        """Whether steps of so many requests are plain because drafts did not pay."""
        return bool(self._facts_of(num_requests).is_off)

    def _facts_of(self, num_requests: int) -> Any:
        self._ask.params.num_requests = num_requests
        self._ask.run()
        return self._facts
