"""Which addresses are this machine's own. Asks no name server."""

from __future__ import annotations

import ipaddress


def is_this_machine(host: str) -> bool:
    """Whether a connection to `host` never leaves this machine: localhost, a loopback address, or 0.0.0.0 and ::."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or address.is_unspecified or (mapped is not None and mapped.is_loopback)


def is_wildcard(host: str) -> bool:
    """Whether listening on `host` is listening on every address."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""
