"""Which instance gets a request, and which one computes its prompt's KV. Sends nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.cluster.membership import Member
from fastdeploy_sd.cluster.placement import PrefixTable
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.wire.http.json_texts import text_field
from fastdeploy_sd.wire.http.model_names import resolve_model
from fastdeploy_sd.wire.http.ollama_models import LATEST

_PROMPT = re.compile(rb'"(?:messages|prompt|prompt_token_ids|input)"\s*:\s*(?=[\["])')


@dataclass(frozen=True, slots=True)
class Placement:
    """The instance that answers a request, and the one that computes its prompt's KV; None = the former does."""

    instance: Instance
    source: Instance | None = None


@dataclass(slots=True)
class RoutingHints:
    """What matters of a request for its place.

    Attributes:
        keys: of its prompt's beginnings.
        model: the name that it asks for, where instances serve several models or adapters; None = any may answer.
        fingerprint: of the instance that has begun to answer; another one must have the same. None = none has.
        tried: instances that failed on it.
        lost: servers whose connection broke on it; all their instances failed.
    """

    keys: Sequence[bytes]
    model: str | None = None
    fingerprint: str | None = None
    tried: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def note_failure(self, member: Member, *, is_of_server: bool) -> None:
        """An instance has failed on the request; `is_of_server`: as all of its server would have."""
        self.tried.add(member.instance_id)
        if is_of_server:
            self.lost.add(member.server)

    def forget_failures(self) -> None:
        self.tried.clear()
        self.lost.clear()

    def avoids(self, member: Member) -> bool:
        """Whether the request goes to this instance only when there is no other."""
        return member.instance_id in self.tried or member.server in self.lost


class Chooser:
    """Chooses among the registered instances by load, and by what they have seen of a prompt where loads are alike."""

    def __init__(
        self,
        available: Callable[[], Sequence[Instance]],
        registered: Callable[[], Sequence[Instance]],
        seen: PrefixTable | None = None,
    ) -> None:
        self._available, self._registered = available, registered
        self._seen = PrefixTable() if seen is None else seen

    def hints(self, body: bytes) -> RoutingHints:
        """Return what matters of a request; NotFound: it names a model that no registered instance serves."""
        model = self._model_of(body)
        return RoutingHints(self._seen.keys_of(prompt_of(body), model or ""), model)

    def _model_of(self, body: bytes) -> str | None:
        """See RoutingHints.model. A body is looked at only where instances differ or have adapters; an instance refuses
        what is none.
        """
        serving = [i for i in self._registered() if i.member.generates]
        served = dict.fromkeys(i.said.served_names for i in serving)
        if len(served) <= 1 and not any(i.member.adapters for i in serving):
            return None
        model = text_field(body, "model")
        if model is None:
            return None
        names = list(dict.fromkeys(name for names in served for name in names))
        found = resolve_model(model, names)
        return found if model in (found, found + LATEST) else None

    def choose(self, hints: RoutingHints) -> Placement | None:
        """Return where a request goes now; None = no instance can take it.

        One that failed on it gets it again only when there is no other.
        """
        available = self._available()
        able = [
            i
            for i in available
            if i.member.generates
            and hints.fingerprint in (None, i.member.fingerprint)
            and (hints.model is None or hints.model in i.said.served_names)
        ]
        candidates = {i.instance_id: i.candidate() for i in available}
        able = [i for i in able if not hints.avoids(i.member)] or able
        adapters = (adapter for i in able for adapter in i.member.adapters if adapter.name == hints.model)
        digest = next((adapter.digest for adapter in adapters), "")
        owners = {i.instance_id: candidates[i.instance_id] for i in able if i.member.has_adapter(digest)}
        placed = self._seen.place(owners, candidates, hints.keys, adapter_digest=digest)
        if placed is None:
            return None
        by_id = {i.instance_id: i for i in available}
        name, source = placed
        return Placement(by_id[name], None if source is None else by_id[source])


def prompt_of(body: bytes) -> memoryview:
    """Return what follows the key that holds a prompt.

    Bodies are not parsed: two clients that write the same prompt differently miss each other, which costs time and
    nothing else.
    """
    found = _PROMPT.search(body)
    return memoryview(body)[len(body) if found is None else found.end() :]
