"""Sets the number of kernel threads of a rank, before it loads anything."""

from __future__ import annotations

import logging

from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)


def set_kernel_threads(config: Config, group: RankGroup) -> None:
    """Set the configured number, else a rank's share of the processors, else leave the library's default.

    Raises:
        ConfigError: as library.set_num_threads.
    """
    num_threads = config.num_threads or (group.num_threads if group.size > 1 else None)
    if num_threads is not None:
        library.set_num_threads(num_threads)
    if library.num_threads() > 1 and own_processors().warning is not None:
        _log.warning("%s", own_processors().warning)
