"""Changes of the LoRA adapters that the engines of a server have, all of them alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.errors import FdsdError, NotFound
from fastdeploy_sd.types import AdapterSource, ModelInfo

logger = logging.getLogger(__name__)


async def change_adapter(engines: Sequence[EngineClient], name: str, folder: str | None) -> AdapterSource:
    """Have engines load an adapter from a folder, or unload it if that is None.

    All load it or, if one of them does not, none. Raises FdsdError: as the first that did not.
    """
    asked = [engine.change_adapter(name, folder) for engine in engines]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if folder is None:  # one that was unknown to some is known to none now
        errors = [error for error in errors if not isinstance(error, NotFound) or len(errors) == len(engines)]
    done = [engine for engine, answer in zip(engines, answers, strict=True) if isinstance(answer, AdapterSource)]
    if errors and folder is not None:
        await asyncio.gather(*(engine.change_adapter(name, None) for engine in done), return_exceptions=True)
    if errors:
        raise errors[0]
    return next(answer for answer in answers if isinstance(answer, AdapterSource))


async def restore_adapters(engine: EngineClient, before: ModelInfo | None, known: Sequence[AdapterSource]) -> None:
    """Give an engine that was started again the adapters that requests may name, and no others.

    `before`: what the engine had before its end; None = it is started for the first time. One that cannot be loaded any
    more is logged; requests for it go to other engines.
    """
    if before is None:
        return
    wanted = {source.adapter.name: source for source in known}
    had = {source.adapter.name: source for source in engine.model_info.adapters}
    changes: list[tuple[str, str | None]] = [(name, None) for name in had if name not in wanted]
    changes += [(name, source.folder) for name, source in wanted.items() if name not in had]
    for name, folder in changes:
        try:
            await engine.change_adapter(name, folder)
        except FdsdError as error:
            logger.warning("adapter %s of an engine that was started again: %s", name, error.message)
