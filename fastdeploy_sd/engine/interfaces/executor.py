"""The engine's view of whatever runs the model. Owns the interface; knows no implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from fastdeploy_sd.engine.interfaces.block_store import BlockStore
from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.interfaces.spread_experts import SpreadExperts
from fastdeploy_sd.types import F32, I32, AdapterLoad, ModelInfo, SchedulerOutput, StepResult

# Gets tokens i32[n] of prompts, and the logits f32[n, V] that each was to be expected from; they hold until it returns.
WatchPrompts = Callable[[I32, F32], None]


class Executor(Protocol):
    """Runs one planned step of the model.

    An executor keeps per-request state (token ids, block table, sampling state) from a request's `NewRequest` until
    its id appears in `finished_ids` or `preempted_ids`. It drops those first, then adds the new ones: the same id may
    be in both.
    """

    @property
    def model_info(self) -> ModelInfo:
        """Limits of the loaded model and of the KV cache allocated for it; constant."""

    @property
    def block_store(self) -> BlockStore | None:
        """Where copies of KV blocks are kept outside of the cache; constant, None = nowhere."""

    @property
    def grammars(self) -> Grammars | None:
        """What compiles the grammars that its steps follow; constant, None = it runs no request with a grammar."""

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run the plan's tokens, verify its drafts, propose the next ones.

        Args:
            plan: its `num_computed_tokens` say where each request's tokens start. Without requests nothing runs, and
                it only says who is gone.

        Returns:
            A result with the plan's step_id and request_ids. A row whose tokens are all known after this step has
            `num_accepted + 1` output tokens; a row whose prompt is unfinished, or which failed, has none. Its output
            tokens hold until the next call; its drafts are not overwritten.

        Raises Exception: what it keeps of requests broke; the engine's state is then unusable. What breaks for some
        requests only (non-finite logits, a kernel that refuses a row) is reported in `StepResult.failed` instead, and
        the others get what they would get without them.
        """

    def shutdown(self) -> None:
        """Release the model and its memory. May be called twice."""


class Launcher(Protocol):
    """Runs steps while its caller does something else. They are finished in the order in which they were started."""

    @property
    def drafts_async(self) -> bool:
        """Whether drafts of open steps stay where they are made; constant. The plan of a later step has
        `MADE_ON_DEVICE` in their place, as many as the step before it planned for the row, or fewer."""

    def start(self, plan: SchedulerOutput, *, is_open: bool) -> bool:
        """Start a step; see `Executor.execute`, which must not be called until it is finished.

        Args:
            is_open: whether a later step needs nothing of its rows but the tokens themselves, and the drafts after
                them.

        Returns:
            Whether one more step may be started before this one is finished; never where it is not open. That one's
            plan counts all drafts of this one as right, and a token more for each row that is due: a row that gets
            fewer runs as many positions earlier. What it gives for a row that has failed, or has ended with its tokens,
            is nothing.
        """

    def finish(self) -> StepResult:
        """Wait for the step that was started first, and return its result; see `Executor.execute`."""


@runtime_checkable
class LaunchingExecutor(Protocol):
    """An executor whose device runs in its own time."""

    @property
    def launcher(self) -> Launcher | None:
        """Starts its steps; constant, None = only `execute` does."""


@runtime_checkable
class ServingExecutor(Protocol):
    """An executor that computes a part of other engines' steps."""

    @property
    def expert_monitor(self) -> SpreadExperts | None:
        """What is known of the experts that it shares with others; constant, None = it shares none."""

    def begin_drain(self) -> None:
        """Let steps fail from now on that wait for an engine which is being started again. For any thread."""

    def leave(self, timeout_s: float) -> None:
        """Serve until no other engine runs steps any more, at most for so long. After the last step of this one."""


class AdapterReader(Protocol):
    """Reads LoRA adapters of the loaded model while steps run. Called by the thread that steps the engine; `fd`:
    readable as long as `take_read` has something to return, None = never.
    """

    fd: int | None

    def digest(self, folder: Path) -> str:
        """Verify an adapter's files, and return their digest. Raises CheckpointError that names file and fault.

        Any thread may call it.
        """

    def begin(self, load: AdapterLoad) -> bool:
        """Start to read an adapter for a place, instead of what is being read for it; the plan that has the load fills
        the place, and says what is wrong with the files.

        Returns whether there must be no such plan before `take_read` has returned the place.
        """

    def take_read(self) -> Sequence[int]:
        """Return, once each, the places for which reading has ended, well or not."""


@runtime_checkable
class AdaptingExecutor(Protocol):
    """An executor whose model runs with LoRA adapters."""

    @property
    def adapters(self) -> AdapterReader | None:
        """Reads them; constant, None = the model takes none."""


@runtime_checkable
class FallibleExecutor(Protocol):
    """An executor part of which may end by itself, also between two steps; `execute` raises from then on."""

    @property
    def failure_fd(self) -> int:
        """Readable once that has happened."""
