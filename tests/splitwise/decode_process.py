"""A decode instance in a process of its own: orders 16 prompts from ADDRESS and prints a line for each that ended.

Usage: python -m tests.splitwise.decode_process PROTOCOLS ADDRESS
"""

from __future__ import annotations

import select
import sys

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.events import Fetched
from tests.splitwise.instances import BytePages, describe, holds, request, settings, source_of

NUM_ORDERS = 16


def main(protocols: str, address: str) -> None:
    pages = BytePages(8 * NUM_ORDERS)
    connector = KvConnector(settings("decode", protocols, silence_s=60.0), describe(), pages)
    orders = {
        connector.fetch(request(n, 8), source_of(address), 0, range(8 * n, 8 * n + 8), 120): n
        for n in range(NUM_ORDERS)
    }
    print("ordered", flush=True)
    while orders:
        select.select([connector.fd], [], [], 1.0)
        for event in connector.take_events():
            n = orders.pop(event.transfer_id)
            is_right = isinstance(event, Fetched) and holds(pages, n, 0, range(8 * n, 8 * n + 8))
            print("right" if is_right else event, flush=True)
    connector.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
