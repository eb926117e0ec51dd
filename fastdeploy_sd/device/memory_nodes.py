"""Memory that all threads read, on machines with several memory nodes: its pages come from all of them in turn.

The system takes a page from the node of the thread that touches it first. That is right for packed weights, which the
threads write in the parts in which they multiply them. A block of KV is written by whichever thread is free and read by
any other: taken in turn, its pages are as near to every thread as they can be, and no node's memory is the bottleneck.
Source: mbind(2), set_mempolicy(2), get_mempolicy(2) of Linux, called without a library of their own.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fastdeploy_sd.device import library
from fastdeploy_sd.device.memory import libc
from fastdeploy_sd.device.processors import Processors, own_processors, read_numbers
from fastdeploy_sd.types import Bytes

_DEFAULT, _INTERLEAVE, _UNTOLD = 0, 3, -1
_LONG_BITS = 64
_PAGE = 4096
# mbind, set_mempolicy, get_mempolicy by what os.uname calls the machine.
_NUMBERS = {"x86_64": (237, 238, 239), "aarch64": (235, 237, 236)}
_NO_CALL = (-1, -1, -1)
_log = logging.getLogger(__name__)


def spread(memory: Bytes) -> Bytes:
    """Take untouched pages of memory from the nodes of `own_nodes` in turn; returns the memory.

    Where the system refuses, memory is as it was, and the log says so once.
    """
    nodes = own_nodes()
    if nodes:
        try:
            interleave(memory, nodes)
        except OSError as error:
            _say_refused(str(error))
    return memory


@contextmanager
def spreading_files() -> Iterator[None]:
    """Meanwhile what this thread writes to files is cached on all nodes of `own_nodes` in turn."""
    nodes = own_nodes()
    if not nodes:
        yield
        return
    try:
        _set_policy(_INTERLEAVE, nodes)
    except OSError as error:
        _say_refused(str(error))
        yield
        return
    try:
        yield
    finally:
        _set_policy(_DEFAULT, ())


def own_nodes() -> Sequence[int]:
    """Return the nodes that this process spreads memory over; () = it leaves that to the system.

    Where the system does not say whether the process has a policy of its own, the log says once that nothing is spread.
    """
    mode = policy()
    choose = functools.partial(nodes_to_spread, Path("/"), own_processors(), library.num_threads())
    if mode == _UNTOLD and choose(_DEFAULT):
        _say_refused("the system refuses get_mempolicy, as a container's filter of system calls may")
    return choose(mode)


def nodes_to_spread(root: Path, processors: Processors, num_threads: int, mode: int) -> Sequence[int]:
    """Return the nodes on which kernel threads may run and memory may be; () unless these are several.

    One thread has its memory near where it runs. A policy set for the process, for example by numactl, has priority:
    `mode` is its number.
    """
    if num_threads == 1 or len(processors.nodes) <= 1 or mode != _DEFAULT:
        return ()
    status = _text(root / "proc/self/status").splitlines()
    lists = [line.split(":")[1] for line in status if line.startswith("Mems_allowed_list:")]
    lists.append(_text(root / "sys/devices/system/node/has_memory"))
    nodes = set(processors.nodes).intersection(*(read_numbers(text.strip()) for text in lists if text))
    return sorted(nodes) if len(nodes) > 1 else ()


def policy(memory: Bytes | None = None) -> int:
    """Return the number of the policy of this thread, or of a piece of memory; -1 where the system does not say."""
    mode = ctypes.c_int(-1)
    address, flags = (None, 0) if memory is None else (memory.ctypes.data, 2)  # MPOL_F_ADDR
    done = _call(2, ctypes.byref(mode), None, ctypes.c_ulong(0), ctypes.c_void_p(address), ctypes.c_ulong(flags))
    return mode.value if done == 0 else _UNTOLD


def interleave(memory: Bytes, nodes: Sequence[int]) -> None:
    """Have untouched whole pages of memory come from these nodes in turn; raises OSError where the system refuses."""
    begin = -(-memory.ctypes.data // _PAGE) * _PAGE
    end = (memory.ctypes.data + memory.nbytes) // _PAGE * _PAGE
    if begin < end:
        address, length = ctypes.c_void_p(begin), ctypes.c_ulong(end - begin)
        _check(_call(0, address, length, ctypes.c_ulong(_INTERLEAVE), *_mask(nodes), ctypes.c_ulong(0)))


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    _check(_call(1, ctypes.c_long(mode), *_mask(nodes)))


def _mask(nodes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """Return a set of nodes and how many bits of it count, which the system takes for one more than there are."""
    words = (ctypes.c_ulong * (max(nodes, default=0) // _LONG_BITS + 1))()
    for node in nodes:
        words[node // _LONG_BITS] |= 1 << node % _LONG_BITS
    return words, ctypes.c_ulong(len(words) * _LONG_BITS + 1)


def _call(which: int, *arguments: object) -> int:
    number = _NUMBERS.get(os.uname().machine, _NO_CALL)[which]
    done: int = libc().syscall(ctypes.c_long(number), *arguments)
    return done


def _check(done: int) -> None:
    if done != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"memory policy: {os.strerror(error)}")


@functools.cache
def _say_refused(reason: str) -> None:
    _log.warning("memory is not spread over memory nodes: %s", reason)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
