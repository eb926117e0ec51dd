"""A handler of HTTP requests on a local port, for the duration of a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], hub: object) -> Iterator[str]:
    """Yield the URL.

    Args:
        handler: has `hub` as an attribute of its class meanwhile.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
