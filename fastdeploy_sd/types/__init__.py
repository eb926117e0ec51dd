"""Every value that crosses a package border. NumPy only; nothing here knows Paddle, sockets or HTTP.

Dimension letters: R requests, T tokens of a step, L logits rows, D drafts, O outputs, V vocabulary, H hidden size.
`cu_*` arrays have n+1 entries, start at 0 and never decrease.
"""

from __future__ import annotations

from fastdeploy_sd.types.adapters import Adapter, AdapterLoad, AdapterSource
from fastdeploy_sd.types.arrays import EMPTY_I32, F32, F64, I8, I32, I64, U8, U16, U64, Bytes, Rows, offsets
from fastdeploy_sd.types.draft_methods import DraftSource
from fastdeploy_sd.types.drafts import MADE_ON_DEVICE, MAX_TREE_ROWS, DraftTokens, LogprobArrays, chain_parents
from fastdeploy_sd.types.models import KvDescription, ModelInfo, SpeculationInfo
from fastdeploy_sd.types.requests import (
    TARGET,
    DraftCounts,
    DraftLogprob,
    FinishReason,
    KvSource,
    Pooling,
    PromptLogprobs,
    Request,
    RequestId,
    RequestMetrics,
    RequestOutput,
    Speculation,
    StepSources,
    TokenLogprob,
)
from fastdeploy_sd.types.states import LIVE_STATE, NO_STATE, StatePlan
from fastdeploy_sd.types.steps import (
    Calibration,
    ChoiceReport,
    NewRequest,
    RequestDelta,
    SamplingArrays,
    SchedulerOutput,
    StepResult,
    StepView,
    VerifyResult,
)

__all__ = [
    "EMPTY_I32", "F32", "F64", "I8", "I32", "I64", "LIVE_STATE", "MADE_ON_DEVICE", "MAX_TREE_ROWS", "NO_STATE",
    "TARGET", "U8", "U16", "U64", "Adapter", "AdapterLoad", "AdapterSource", "Bytes",
    "Calibration", "ChoiceReport", "DraftCounts", "DraftLogprob",
    "DraftSource", "DraftTokens", "FinishReason", "KvDescription",
    "KvSource", "LogprobArrays", "ModelInfo", "NewRequest", "Pooling", "PromptLogprobs", "Request", "RequestDelta",
    "RequestId",
    "RequestMetrics", "RequestOutput", "Rows", "SamplingArrays", "SchedulerOutput", "Speculation", "SpeculationInfo",
    "StatePlan", "StepResult", "StepSources", "StepView", "TokenLogprob", "VerifyResult", "chain_parents", "offsets",
]  # fmt: skip
