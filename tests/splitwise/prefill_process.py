"""A prefill instance in a process of its own; prints its address, then a line per order, until its input ends.

Usage: python -m tests.splitwise.prefill_process PROTOCOLS BEHAVIOUR, where the behaviour is one of PrefillEngine's.
"""

from __future__ import annotations

import select
import sys
from typing import cast

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from tests.splitwise.instances import Behaviour, BytePages, PrefillEngine, describe, settings


def main(protocols: str, behaviour: Behaviour) -> None:
    pages = BytePages(4096)
    connector = KvConnector(settings("prefill", protocols), describe(), pages)
    engine = PrefillEngine(connector, pages, 8, behaviour)
    print(connector.address, flush=True)
    while sys.stdin.fileno() not in select.select([connector.fd, sys.stdin], [], [], 1.0)[0]:
        num_before = engine.num_orders
        engine.step()
        print("order\n" * (engine.num_orders - num_before), end="", flush=True)
    connector.close()


if __name__ == "__main__":
    main(sys.argv[1], cast(Behaviour, sys.argv[2]))
