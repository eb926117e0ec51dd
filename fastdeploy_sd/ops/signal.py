"""signal_: a pass says how far it has come."""

from __future__ import annotations

from fastdeploy_sd.device.program.declaration import I32, I64, Attr, In, InOut
from fastdeploy_sd.device.program.op import A, Op

SIGNAL = Op("signal", None, event_fd=Attr(int), positions=In(I32, "num_tokens"), counter=InOut(I64, "1"))


def signal_(positions: A, counter: A, event_fd: int) -> None:
    """Add 1 to the counter i64[1], in place, after all that the calls before it wrote, and wake who waits for it.

    Args:
        positions: i32[T] of the pass that the call belongs to; not read.
        event_fd: an eventfd to which 1 is added; -1 = none.
    """
    SIGNAL(positions=positions, counter=counter, event_fd=event_fd)
