"""The instance's side: tells routers that it is there, how busy it is, and that it leaves. Knows no engine.

Each router has a task of its own, which tries again for ever: a router that is started later, or anew, or cannot be
reached for a while, costs the instance a line in the log and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.membership import Member
from fastdeploy_sd.errors import FdsdError, InternalError, NotFound
from fastdeploy_sd.wire.http_client import Ask, HttpClient, Target

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_PAUSE_S = 1.0
_MAX_ANSWER_BYTES = 1 << 16
_MENTIONED_S = 10.0


class Registrar:
    """Keeps the instances of a server registered with routers from `start` until `leave`.

    Args:
        identities: each returns an instance as it is now, with its load. One whose engine has been started again may
            have another kv_address, and then registers anew.
    """

    def __init__(
        self,
        routers: Sequence[Target],
        identities: Sequence[Callable[[], m.Registration]],
        key: bytes,
        clock: Callable[[], m.Clock] = m.Clock.now,
    ) -> None:
        self._routers = routers
        self._identities = identities
        self._codec = m.codec_for(key)
        self._clock = clock
        self._http = HttpClient(_TIMEOUT_S)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_leaving = asyncio.Event()

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep_registered(router, identity))
            for router in self._routers
            for identity in self._identities
        ]

    def begin_leaving(self) -> None:
        """Tell the routers, soon, that nothing new may come; what runs goes on."""
        self._is_leaving.set()

    async def leave(self) -> None:
        """Wait until the routers know, for some seconds at most."""
        self.begin_leaving()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._http.close()

    async def _keep_registered(self, router: Target, identity: Callable[[], m.Registration]) -> None:
        is_known, last_text = False, ""
        while not self._is_leaving.is_set():
            try:
                said = identity()
                session = await self._register(router, said)
                logger.info("registered with the router at %s as %s", router, _named(said.member))
                is_known, last_text = True, ""
                await self._beat(router, session, said.member, identity)
            except (FdsdError, TimeoutError, OSError) as error:
                text = error.message if isinstance(error, FdsdError) else f"no answer within {_TIMEOUT_S:g} s"
                if is_known or text != last_text:
                    logger.warning("not registered with the router at %s: %s", router, text)
                is_known, last_text = False, text
                await self._pause(_PAUSE_S)

    async def _register(self, router: Target, said: m.Registration) -> str:
        challenge = await self._call(router, Ask("GET", m.CHALLENGE))
        text, clock = str(challenge.get("challenge")), self._clock()
        answer = await self._call(router, self._signed(m.REGISTER, replace(said, challenge=text, clock=clock)))
        wall = answer.get("time")
        if isinstance(wall, float) and (difference := clock_difference(clock.wall, wall)):
            logger.warning("this machine's clock is %s that of the router at %s", difference, router)
        return str(answer.get("session"))

    async def _beat(self, router: Target, session: str, member: Member, identity: Callable[[], m.Registration]) -> None:
        """Give signs of life until the end, or until the instance is another one than it was when it registered."""
        number = 0
        while not self._is_leaving.is_set():
            if (said := identity()).member != member:
                return
            number += 1
            beat = m.Heartbeat(session, number, said.load, self._clock())
            await self._call(router, self._signed(m.HEARTBEAT, beat))
            await self._pause(m.HEARTBEAT_S)
        last = m.Heartbeat(session, number + 1, replace(identity().load, takes_requests=False), self._clock())
        await self._call(router, self._signed(m.DEREGISTER, last))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._is_leaving.wait()
        except TimeoutError:
            return

    def _signed(self, path: str, message: m.Registration | m.Heartbeat) -> Ask:
        return Ask("POST", path, body=self._codec.encode(path, message))

    async def _call(self, router: Target, ask: Ask) -> dict[str, Any]:
        status, text = await self._http.fetch(router, ask, _MAX_ANSWER_BYTES, _TIMEOUT_S)
        answer = _object_of(text)
        if status == NotFound.status:
            raise NotFound("it does not know this instance any more")
        if status >= 400:  # noqa: PLR2004 (where HTTP's errors begin)
            error = answer.get("error")
            reason = error.get("message") if isinstance(error, dict) else None
            raise InternalError(f"it answers {status}: {reason or 'without a reason'}")
        return answer


def clock_difference(wall: float, reference: float) -> str:
    """Return in words how far a clock is from another one, "" where that is not worth a line. Requests do not mind."""
    seconds = wall - reference
    if abs(seconds) < _MENTIONED_S:
        return ""
    return f"{abs(seconds):.0f} s {'later than' if seconds > 0 else 'earlier than'}"


def _named(member: Member) -> str:
    return member.role if member.engine is None else f"{member.role}, engine {member.engine}"


def _object_of(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
