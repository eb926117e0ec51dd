"""Who is there: instances that proved to be of this deployment, until they leave or fall silent. Knows no request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from typing import TypeVar

from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.membership import DECODE, PREFILL, ROLES
from fastdeploy_sd.cluster.registrar import clock_difference
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import RouterConfig
from fastdeploy_sd.config import is_this_machine
from fastdeploy_sd.errors import BadRequest, Forbidden, NotFound, shown
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.protocol import SignatureError, mac

logger = logging.getLogger(__name__)

M = TypeVar("M")

_SWEEP_S = 0.25
_FORGET_S = 60.0
_CHALLENGE_LIFE_S = 30.0


class Challenges:
    """Words that a registration must name, so that one for another router, or an earlier one, is worth nothing.

    A word says itself when it was made, under a key that only this object has. Only used words are remembered, and only
    while they would be valid, so asking for many costs nothing.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def make(self) -> str:
        text = f"{time.monotonic():.6f}.{secrets.token_hex(16)}"
        return f"{text}.{self._signature(text)}"

    def use(self, word: str) -> bool:
        """Whether a word is ours, young and new; it is not the next time. Call it for authenticated messages only."""
        text, _, signature = word.rpartition(".")
        if not hmac.compare_digest(self._signature(text).encode(), signature.encode("utf-8", "replace")):
            return False
        now = time.monotonic()
        self._used = {used: made for used, made in self._used.items() if now - made < _CHALLENGE_LIFE_S}
        made = float(text.rpartition(".")[0])
        if now - made >= _CHALLENGE_LIFE_S or word in self._used:
            return False
        self._used[word] = made
        return True

    def _signature(self, text: str) -> str:
        return mac(self._key, "challenge", text.encode("utf-8", "replace")).hex()


class Registry:
    """The instances of a router; `key` is that of registrations."""

    def __init__(self, config: RouterConfig, key: bytes) -> None:
        self._routing = config.routing
        self._codec = m.codec_for(key)
        self._is_local = config.splitwise.pd_secret is None
        self._challenges = Challenges()
        self._by_session: dict[str, Instance] = {}

    @property
    def instances(self) -> list[Instance]:
        """All of them, silent ones too."""
        return list(self._by_session.values())

    def available(self) -> list[Instance]:
        """Those that get new requests."""
        return [i for i in self._by_session.values() if i.may_take(self._routing.silent_s)]

    def challenge(self) -> str:
        return self._challenges.make()

    def register(self, frame: bytes, host: str) -> str:
        """Take an instance in; return its session. Forbidden: not of this deployment, BadRequest: no use for it."""
        said = self._read(m.Registration, m.REGISTER, frame)
        if self._is_local and not is_this_machine(host):
            raise Forbidden(f"pd_secret: expected it to be set, as others than this machine ({host}) may register")
        if not self._challenges.use(said.challenge):
            raise Forbidden("challenge: expected a new one of this router, got another or one that was used")
        self._verify_use(said)
        instance = self._renewed(said, host) or Instance(said, secrets.token_hex(16), host)
        for known in self.instances:
            if known.target == instance.target and known.member.server != instance.member.server:
                self._drop(known, "another one registered at its address")
        self._by_session[instance.session] = instance
        logger.info("%s instance %s registered, at %s", said.member.role, said.member.instance_id, instance.target)
        if difference := clock_difference(said.clock.wall, time.time()):
            logger.warning("the clock of instance %s is %s this machine's", said.member.instance_id, difference)
        self._mention_mismatches(instance)
        return instance.session

    def partners(self, instance: Instance) -> dict[str, str | None]:
        """Return id -> why not (None = they do) of the instances that could exchange KV with one: of the other of the
        roles prefill and decode, and serving a model of its name."""
        is_decode = instance.member.role == DECODE
        role = {DECODE: PREFILL, PREFILL: DECODE}.get(instance.member.role)
        return {
            i.instance_id: instance.member.kv_mismatch(i.member) if is_decode else i.member.kv_mismatch(instance.member)
            for i in self.instances
            if i.member.role == role and not set(instance.said.served_names).isdisjoint(i.said.served_names)
        }

    def _mention_mismatches(self, instance: Instance) -> None:
        reasons = {name: reason for name, reason in self.partners(instance).items() if reason is not None}
        if reasons:
            (name, reason), *others = reasons.items()
            more = f" and {len(others)} more" if others else ""
            logger.warning(
                "%s instance %s exchanges no KV with %s%s: %s",
                instance.member.role, instance.instance_id, name, more, reason,
            )  # fmt: skip

    def _renewed(self, said: m.Registration, host: str) -> Instance | None:
        """The instance that registers again, with a new session and what it was given; None = it is new."""
        known = next((i for i in self.instances if i.instance_id == said.member.instance_id), None)
        if known is not None:
            del self._by_session[known.session]
            known.renew(said, secrets.token_hex(16), host)
        return known

    def heartbeat(self, frame: bytes) -> None:
        """Take a sign of life; NotFound: the session is none, or ended."""
        beat = self._read(m.Heartbeat, m.HEARTBEAT, frame)
        self._session(beat).report(beat.load, beat.clock)

    def deregister(self, frame: bytes) -> None:
        """Let an instance go; what it has been given goes on there."""
        beat = self._read(m.Heartbeat, m.DEREGISTER, frame)
        instance = self._session(beat)
        del self._by_session[instance.session]
        logger.info("instance %s deregistered", instance.instance_id)

    def _session(self, beat: m.Heartbeat) -> Instance:
        instance = self._by_session.get(beat.session)
        if instance is None:
            raise NotFound("session: expected that of a registered instance, got another", code="unknown_session")
        if beat.number <= instance.number:
            raise Forbidden(f"number: expected more than {instance.number}, got {beat.number}: said before")
        instance.number = beat.number
        return instance

    def _read(self, kind: type[M], path: str, frame: bytes) -> M:
        try:
            return self._codec.decode(path, kind, frame)
        except SignatureError:
            text = "signature: expected one made with this deployment's secret (pd_secret), got another"
            raise Forbidden(text, code="wrong_secret") from None
        except ProtocolError as error:
            text = f"message: expected one of protocol version {m.PROTOCOL.version}, got another: {error.message}"
            raise BadRequest(text) from None

    def _verify_use(self, said: m.Registration) -> None:
        roles = (PREFILL, DECODE) if self._routing.splitwise else ROLES
        if said.member.role not in roles:
            raise BadRequest(f"role: expected one of {', '.join(roles)}, got {shown(said.member.role)}")

    async def watch(self) -> None:
        """Have requests go on elsewhere when their instance is lost; runs until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for instance in self.instances:
                if instance.silence_s >= _FORGET_S:
                    self._drop(instance, "it has been silent for long")
                elif instance.silence_s >= self._routing.lost_s and instance.exchanges:
                    logger.warning("instance %s is silent: its requests go on elsewhere", instance.instance_id)
                    _abort(instance)

    def _drop(self, instance: Instance, reason: str) -> None:
        logger.info("instance %s is forgotten: %s", instance.instance_id, reason)
        del self._by_session[instance.session]
        if instance.silence_s >= self._routing.lost_s:
            _abort(instance)


def _abort(instance: Instance) -> None:
    for exchange in list(instance.exchanges):
        exchange.abort()
