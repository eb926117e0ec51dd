"""Parts of the native draft controller, each driven alone."""

from __future__ import annotations

import ctypes
from typing import Any

from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.cost import CostModel
from fastdeploy_sd.spec_decode.control.profile import CostProfile
from fastdeploy_sd.types import DraftSource


class RegressionDetector:
    """See RegressionDetector in custom_ops/cpu/drafters: told of every step, asked before the next one."""

    def __init__(self) -> None:
        self._controller = DraftController(0, 1, (DraftSource.NGRAM,))
        handle = self._controller.handle
        self._facts: Any = struct_type("ControllerGainFacts")()
        where = ctypes.addressof(self._facts)
        params = struct_type("ControllerGainFactsParams")(controller=handle, facts=where)
        self._ask = BoundCall("controller_tell_gain", params)
        self._observe = BoundCall("controller_observe_gain", struct_type("ControllerGainParams")(controller=handle))

    @property
    def gain(self) -> float:
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
        params = self._observe.params
        params.num_requests, params.num_tokens, params.num_drafts = num_requests, num_tokens, num_drafts
        params.seconds, params.asking_s, params.slowdown_ratio = seconds, asking_s, slowdown_ratio
        self._observe.run()

    def is_worth_asking(self, num_requests: int) -> bool:
        return bool(self._facts_of(num_requests).is_worth_asking)

    def least_gain(self, num_requests: int) -> float:
        return float(self._facts_of(num_requests).least_gain)

    def is_off(self, num_requests: int) -> bool:
        return bool(self._facts_of(num_requests).is_off)

    def _facts_of(self, num_requests: int) -> Any:
        self._ask.params.num_requests = num_requests
        self._ask.run()
        return self._facts


class FollowedCost(CostModel):
    """Times that follow what steps take, as a server's do; see StepCost in custom_ops/cpu/drafters."""

    def __init__(self, profile: CostProfile, max_num_rows: int) -> None:
        super().__init__(profile, max_num_rows)
        self._run_expected, self._run_observe = (
            BoundCall(f"controller_{op}_time", self._params).run for op in ("expected", "observe")
        )

    def observe(self, num_rows: int, num_requests: int, num_kv_tokens: int, ms: float) -> None:
        self._name_step(num_rows, num_requests, num_kv_tokens)
        self._params.ms = ms
        self._run_observe()

    def expected(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> float:
        self._name_step(num_rows, num_requests, num_kv_tokens)
        self._run_expected()
        return self._outcome.item(0)

    @property
    def speed(self) -> float:
        return self._outcome.item(1)
