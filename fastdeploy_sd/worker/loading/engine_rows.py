"""What several engines come to: each one's host, cores, GPUs and memory, and all of them compared with one."""

from __future__ import annotations

import os
from pathlib import Path

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.engine_cores import divided
from fastdeploy_sd.device.processors import read_cores
from fastdeploy_sd.worker.autotune.speed_limits import describe_engines, measure_limits

_GIB = 1 << 30


def num_copies(config: Config, root: Path = Path("/")) -> int:
    """Return how many copies of the weights all engines of a model on a host have.

    Engines of one command have one for each memory node; one whose cores lie on several maps a file, as do those of
    several commands, or has its own.
    """
    parallel, has_file = config.parallel, config.model.packed_weights_folder is not None
    count, before = parallel.engines_per_host, parallel.neighbours.engines_before
    if parallel.num_local_engines < count:
        return 1 if has_file else count
    shares = divided(read_cores(root, os.sched_getaffinity(0)), parallel.engines_on_host)[before : before + count]
    apart = [share for share in shares if len(share.nodes) > 1]
    shared = {tuple(share.nodes) for share in shares if len(share.nodes) <= 1}
    return len(shared) + (min(len(apart), 1) if has_file else len(apart))


def processor_rows(config: Config, gpu: CudaLibrary | None, root: Path = Path("/")) -> dict[str, str]:
    """Return name -> text of what each engine that this command starts runs on; {} for an only engine."""
    parallel = config.parallel
    count, num_ranks = parallel.engines_on_host, parallel.tensor_parallel_size
    if count == 1:
        return {}
    ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
    first = parallel.neighbours.engines_before + parallel.first_engine
    own = range(first, first + parallel.num_local_engines)
    which = "all of them from this command" if len(own) == count else f"number {own[0]} from this command"
    if count > parallel.engines_per_host:
        which = f"{len(own)} of this model"
    rows = {"engines": f"{count}{ranks}, {which}"}
    shares = divided(read_cores(root, os.sched_getaffinity(0)), count)
    for number in own:
        text = shares[number % count].describe()
        first = parallel.neighbours.ranks_before + (number - parallel.neighbours.engines_before) * num_ranks
        if gpu is not None:
            text += f"; GPU {first}" if num_ranks == 1 else f"; GPUs {first} to {first + num_ranks - 1}"
        rows[f"engine {number}"] = text
    return rows


def host_rows(config: Config) -> dict[str, str]:
    """Return name -> text of what runs on each of several hosts; {} for an only one."""
    parallel = config.parallel
    if parallel.num_hosts == 1:
        return {}
    are_engines = parallel.data_parallel_size > 1
    count = parallel.engines_per_host if are_engines else parallel.ranks_per_node
    name = "engine" if are_engines else "rank"
    rows = {}
    for number, address in enumerate(parallel.ips):
        first, last = number * count, (number + 1) * count - 1
        rows[f"host {address}"] = f"{name} {first}" if count == 1 else f"{name}s {first} to {last}"
    return rows


def memory_rows(config: Config, weight_bytes: int, total_bytes: int, kv_bytes: int) -> dict[str, str]:
    """Return the row about main memory of several engines; {} for an only one.

    Args:
        weight_bytes: of the weights that an engine reads.
        total_bytes: of the weights of all of them together.
        kv_bytes: that each engine's KV cache and recurrent states may take.
    """
    count = config.parallel.engines_per_host
    if count == 1:
        return {}
    num = num_copies(config)
    how = "one copy of the weights for all" if num == 1 else f"{num} copies of the weights"
    if num > 1:
        of_commands = config.parallel.num_local_engines < count
        how += " (packed_weights_cache makes it one for all)" if of_commands else " (one for each memory node)"
    if config.parallel.expert_ranks > 1:
        how += ", and one of the experts"
    total = total_bytes + count * kv_bytes
    return {
        "memory of engines": f"{weight_bytes / _GIB:.2f} GiB of weights, {kv_bytes / _GIB:.2f} GiB of KV cache each;"
        f" {total / _GIB:.2f} GiB in all: {how}"
    }


def speed_rows(config: Config) -> dict[str, str]:
    """Measure the machine, and return the row that compares several engines with one; {} for an only one.

    Raises ConfigError: the kernel library cannot be used.
    """
    count = config.parallel.engines_per_host  # of one model: others compute something else
    return {} if count == 1 else {"several engines": describe_engines(measure_limits(config), count)}
