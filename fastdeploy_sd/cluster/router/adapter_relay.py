"""Loads and unloads LoRA adapters at all instances of a model, through the routes of their servers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence

from fastdeploy_sd.cluster.router.delivery import error_of
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.errors import BadRequest, InstancesFailed, NoInstance, NotFound, Unavailable, shown
from fastdeploy_sd.wire.http.api_paths import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from fastdeploy_sd.wire.http.json_texts import text_field
from fastdeploy_sd.wire.http_client import Ask, Headers, HttpClient, Target

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_MAX_ANSWER_BYTES = 1 << 16
_OK, _MISSING = 200, 404
# Instances say within about a second which adapters they have.
_KNOWN_S = 5.0
_LOOK_S = 0.05
Answers = dict[Target, tuple[int, bytes]]


class AdapterRelay:
    """Asks each server once; its engines are instances.

    Raises (from every method):
        BadRequest, NotFound: the body names no adapter, or no model. InstancesFailed: at some servers it failed.
    """

    def __init__(self, instances: Callable[[], Sequence[Instance]], http: HttpClient) -> None:
        self._instances, self._http = instances, http

    async def load(self, content: bytes, headers: Headers) -> tuple[int, bytes]:
        """Load an adapter at all instances of its model that lack it, or at none; return the status and a body.

        Requests may name it when this returns.
        """
        name, serving = _name_of(content), self._of_model(text_field(content, "base_model_name"))
        lacking = [i for i in serving if name not in i.said.served_names] or serving
        answers = await self._ask_all(LOAD_ADAPTER_PATH, lacking, content, headers)
        done = [i for i in lacking if answers[i.target][0] == _OK]
        if len(done) == len(lacking):
            await self._until_known(name, lacking, is_loaded=True)
            digests = {a.digest for i in self._instances() for a in i.member.adapters if a.name == name}
            if len(digests) <= 1:
                return next(iter(answers.values()))
            text = f"lora_path: expected the files that other instances have loaded as {shown(name)}, got others"
            answers = {target: (BadRequest.status, text.encode()) for target in answers}
        elif (refusal := _common(answers)) is not None:
            return refusal
        undone = await self._ask_all(UNLOAD_ADAPTER_PATH, done, json.dumps({"lora_name": name}).encode(), headers)
        await self._until_known(name, [i for i in done if undone[i.target][0] == _OK], is_loaded=False)
        left = [str(target) for target, (status, _) in undone.items() if status != _OK]
        ending = f"it is still loaded at {', '.join(left)}" if left else "those that had loaded it have unloaded it"
        raise InstancesFailed(f"load: expected all instances to load {shown(name)}, got {_faults(answers)}; {ending}")

    async def unload(self, content: bytes, headers: Headers) -> tuple[int, bytes]:
        """Unload an adapter at all instances that have it; return the status and a body."""
        name = _name_of(content)
        having = [i for i in self._instances() if any(a.name == name for a in i.member.adapters)]
        if not having:
            raise NotFound(f"lora_name: expected a loaded adapter, got {shown(name)}", param="lora_name")
        answers = await self._ask_all(UNLOAD_ADAPTER_PATH, having, content, headers)
        done = [i for i in having if answers[i.target][0] in (_OK, _MISSING)]
        await self._until_known(name, done, is_loaded=False)
        if len(done) == len(having):
            return min(answers.values())
        if (refusal := _common(answers)) is not None:
            return refusal
        text = f"unload: expected all instances to unload {shown(name)}, got {_faults(answers)}; the others have"
        raise InstancesFailed(text)

    def _of_model(self, base: str | None) -> list[Instance]:
        """Return the instances that serve a model; None = the only one."""
        instances = self._instances()
        bases = dict.fromkeys(i.said.served_names[0] for i in instances)
        found = [i for i in instances if base is None or base in i.said.served_names]
        if not bases:
            raise NoInstance("expected an instance, got none", code="no_instance")
        if not found or (base is None and len(bases) > 1):
            wanted = f"one of {', '.join(map(repr, bases))}"
            got = "null" if base is None else shown(base)
            raise BadRequest(f"base_model_name: expected {wanted}, got {got}", param="base_model_name")
        return found

    async def _ask_all(self, path: str, instances: Sequence[Instance], content: bytes, headers: Headers) -> Answers:
        """Return each server's status and body; of one that does not answer, why."""

        wanted = Ask("POST", path, headers, content)

        async def ask(target: Target) -> tuple[int, bytes]:
            try:
                return await self._http.fetch(target, wanted, _MAX_ANSWER_BYTES, _TIMEOUT_S)
            except TimeoutError:
                return 0, f"no answer within {_TIMEOUT_S:g} s".encode()
            except Unavailable as error:
                return 0, error.message.encode()

        targets = list(dict.fromkeys(instance.target for instance in instances))
        return dict(zip(targets, await asyncio.gather(*map(ask, targets)), strict=True))

    async def _until_known(self, name: str, instances: Sequence[Instance], *, is_loaded: bool) -> None:
        """Wait until instances have said that they have an adapter, or have none any more."""
        wanted = {instance.instance_id for instance in instances}
        deadline = time.monotonic() + _KNOWN_S
        while time.monotonic() < deadline:
            asked = [i for i in self._instances() if i.instance_id in wanted]
            if all((name in instance.said.served_names) == is_loaded for instance in asked):
                return
            await asyncio.sleep(_LOOK_S)
        logger.warning("adapter %s: instances have not said yet what they have", name)


def _name_of(content: bytes) -> str:
    name = text_field(content, "lora_name")
    if name is None:
        raise BadRequest("lora_name: expected a string, got none", param="lora_name")
    return name


def _common(answers: Answers) -> tuple[int, bytes] | None:
    """Return what all servers have answered alike."""
    different = set(answers.values())
    return None if len(different) > 1 or not min(different)[0] else different.pop()


def _faults(answers: Answers) -> str:
    """Say which servers failed, and with what."""
    faults = [
        f"{target} answered {status}: {error_of(body)[1] or body.decode('utf-8', 'replace')}"
        if status
        else f"{target}: {body.decode()}"
        for target, (status, body) in answers.items()
        if status != _OK
    ]
    return "; ".join(faults)
