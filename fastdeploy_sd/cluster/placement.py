"""Which instance takes a request: by the instances' loads, and by which of them have seen the beginning of its prompt.

Prefix caches may still hold what was seen. Routers and instances that share requests through Redis choose alike. Knows
no network and no request.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_sd.cluster.membership import DECODE, InstanceLoad, Member

# An instance that is preferred, because it has the prompt's prefix or the client's connection, is taken while it is
# fuller than the emptiest by no more than this share of what it runs at once.
PREFERENCE = 0.25
_BLOCK_BYTES = 256
_MAX_BLOCKS = 64
MAX_ENTRIES = 1 << 18  # some 60 MB, where there are so many
_MAX_INSTANCES = 4  # per beginning
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that may take a request, and its load with the requests that it may not know yet."""

    member: Member
    load: InstanceLoad


def choose(
    loads: Mapping[str, InstanceLoad],
    preferred: Sequence[str] = (),
    rng: random.Random | None = None,
    preference: float = PREFERENCE,
) -> str | None:
    """Return the instance that takes the next request; None = there is none.

    The emptiest does, by share, and one of them at random when several are. The first of the preferred ones that is
    hardly fuller than that takes its place.

    Args:
        loads: instance -> its load; of the instances that may take the request.
        preferred: instances by preference; those that are not in `loads` are passed over.
        rng: breaks ties; None = the module's own.
        preference: see PREFERENCE.
    """
    if not loads:
        return None
    least = min(load.share for load in loads.values())
    for name in preferred:
        if name in loads and loads[name].share <= least + preference:
            return name
    emptiest = sorted(name for name, load in loads.items() if load.share == least)
    return (rng or random).choice(emptiest)


class PrefixTable:
    """Beginnings of prompts and the instances that got them last; the oldest ones are forgotten.

    Args:
        max_entries: beginnings it holds at most.
        rng, preference: see `choose`.
    """

    def __init__(
        self, max_entries: int = MAX_ENTRIES, rng: random.Random | None = None, preference: float = PREFERENCE
    ) -> None:
        self._max_entries, self._rng, self._preference = max_entries, rng, preference
        self._secret = secrets.token_bytes(_DIGEST_BYTES)  # so that no client can make two beginnings collide
        self._instances: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def keys_of(self, prompt: bytes | memoryview, salt: str = "") -> list[bytes]:
        """Return a key per whole block of a prompt, each of everything up to there; `salt`: prompts with another one
        share nothing.
        """
        keys: list[bytes] = []
        digest = hashlib.blake2b(salt.encode(), key=self._secret, digest_size=_DIGEST_BYTES)
        for number in range(min(len(prompt) // _BLOCK_BYTES, _MAX_BLOCKS)):
            digest.update(prompt[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES])
            keys.append(digest.digest())
        return keys

    def choose(self, loads: Mapping[str, InstanceLoad], keys: Sequence[bytes], home: str | None = None) -> str | None:
        """Return the instance that takes a prompt, as `choose` does, and note that it gets it; None = there is none.

        The one that has seen the longest part is preferred, `home` before others that have seen as much.
        """
        chosen = choose(loads, self._preferred(keys, home), self._rng, self._preference)
        if chosen is not None:
            self._note(keys, chosen)
        return chosen

    def place(
        self,
        able: Mapping[str, Candidate],
        others: Mapping[str, Candidate],
        keys: Sequence[bytes],
        home: str | None = None,
        adapter_digest: str = "",
    ) -> tuple[str, str | None] | None:
        """Return the instance that takes a prompt, and the one that computes its KV; None = there is none.

        `able` may take it, `others` compute its KV where that is a decode instance which takes theirs, and they have
        its adapter.
        """
        name = self.choose({name: found.load for name, found in able.items()}, keys, home)
        if name is None:
            return None
        member = able[name].member
        if member.role != DECODE:
            return name, None
        sources = {
            other: found.load
            for other, found in others.items()
            if found.member.computes_kv
            and found.member.has_adapter(adapter_digest)
            and member.kv_mismatch(found.member) is None
        }
        return name, self.choose(sources, keys)

    def _preferred(self, keys: Sequence[bytes], home: str | None) -> list[str]:
        found: dict[str, None] = {}
        for key in reversed(keys):
            found.update(dict.fromkeys(sorted(self._instances.get(key, ()), key=lambda name: name != home)))
        return [*found] if home is None or home in found else [*found, home]

    def _note(self, keys: Sequence[bytes], instance: str) -> None:
        for key in keys:
            others = [other for other in self._instances.pop(key, ()) if other != instance]
            self._instances[key] = (instance, *others[: _MAX_INSTANCES - 1])
        while len(self._instances) > self._max_entries:
            self._instances.popitem(last=False)

    def __len__(self) -> int:
        return len(self._instances)
