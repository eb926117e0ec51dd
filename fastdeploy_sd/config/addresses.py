"""Finds this machine's own addresses, without a name server."""

from __future__ import annotations

import ipaddress
import socket


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


def is_bindable(address: str) -> bool:
    """Whether a numeric address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent, and no client can connect
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
