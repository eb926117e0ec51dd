"""What every process of a server knows of the deployment it belongs to, and whether it can take part."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from fastdeploy_sd.cluster.redis.frames import PROTOCOL
from fastdeploy_sd.cluster.redis.store import Store, StoreDown
from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.ipc.messages import max_frame_bytes
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.protocol import SignedCodec
from fastdeploy_sd.wire.secret import deployment_secret, derive_key

logger = logging.getLogger(__name__)

# A frame may hold a request at all its limits, or the outputs of a step.
_MIN_FRAME_BYTES = 1 << 20
_BEATS = 3


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """The deployment's times, in seconds.

    Attributes:
        expire_s: an instance whose record is older is not there.
        beat_s: between two heartbeats, and two questions for a request.
        timeout_s: a request without a sign of life for longer is lost.
        list_ttl_s: a list that was not appended to for longer is gone.
        ttl_s: longest time between two outputs of a request.
    """

    expire_s: float
    ttl_s: float

    @property
    def beat_s(self) -> float:
        return self.expire_s / _BEATS

    @property
    def timeout_s(self) -> float:
        return 2 * self.expire_s

    @property
    def list_ttl_s(self) -> float:
        return 2 * self.timeout_s

    @classmethod
    def of(cls, config: Config) -> LeaseConfig:
        return cls(config.redis.expire_period_ms / 1000, float(config.redis.ttl_s))


def codec_for(config: Config, info: ModelInfo) -> SignedCodec:
    """Return what signs and reads this deployment's frames; raises as `deployment_secret`."""
    key = derive_key(deployment_secret(config.splitwise), "redis")
    return SignedCodec(PROTOCOL, key, config.redis.topic, max(2 * max_frame_bytes(info), _MIN_FRAME_BYTES))


def digest_of(info: ModelInfo) -> str:
    """Return a digest of everything that a request's tokens and limits depend on; "" = the model's is not known."""
    if not info.fingerprint:
        return ""
    facts = (PROTOCOL.version, info.fingerprint, info.vocab_size, info.max_model_len, sorted(info.eos_token_ids))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def model_server(server: str, config: Config) -> str:
    """Return the name of the part of a server that serves a model, by which its processes know their own engines."""
    return f"{server}.{config.parallel.neighbours.engines_before}"


async def verify_deployment(config: Config) -> None:
    """Check, before a model is loaded, what a restart would not heal. A Redis that does not answer is only logged."""
    deployment_secret(config.splitwise)
    store = Store(config.redis, RedisStats())
    try:
        await store.verify()
    except StoreDown as error:
        logger.error("%s: the server starts without it, and uses it when it answers", error.message)
    finally:
        await store.close()
