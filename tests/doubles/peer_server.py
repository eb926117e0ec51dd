"""A peer's server that counts: OpenAI's completions, streamed or whole, in the demo model's tokenizer.

peer_server.py PORT [FAULT]    FAULT: "text" answers with the wrong text, "length" with a token too few, "shape" without
a text, "names" lists no models, "silent" never answers, "crash" ends when it is asked, "dead" at once
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from tokenizers import Tokenizer

from benchmarks.peers.counting import answer
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig


class Counting(BaseHTTPRequestHandler):
    """Speaks HTTP/1.0: a connection ends with its answer."""

    tokenizer: Tokenizer
    fault = ""

    def do_GET(self) -> None:
        """Readiness and the name of the model."""
        self._send(json.dumps({"data": [] if self.fault == "names" else [{"id": "counting"}]}))

    def do_POST(self) -> None:
        """A completion, or the tokens of a chat's only message."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fault == "silent":
            time.sleep(60)
        if self.fault == "crash":
            print("an illegal instruction", file=sys.stderr, flush=True)
            os._exit(3)
        if self.fault == "shape":
            self._send('{"choices": []}')
            return
        if self.path == "/tokenize":
            self._send(json.dumps({"tokens": self.tokenizer.encode(body["messages"][0]["content"]).ids}))
            return
        token_ids = answer(body["prompt"], body["max_tokens"] - (self.fault == "length"))
        text = "nonsense" if self.fault == "text" else self.tokenizer.decode(token_ids)
        whole = {"choices": [{"text": text}], "usage": {"completion_tokens": len(token_ids)}}
        self._send(f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n" if body.get("stream") else json.dumps(whole))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what a server prints is taken for its last words."""

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    port, Counting.fault = int(sys.argv[1]), sys.argv[2]
    if Counting.fault == "dead":
        sys.exit("no room for the model")
    Counting.tokenizer = Tokenizer.from_file(f"{ModelConfig(DEMO_MODEL).path}/tokenizer.json")
    HTTPServer(("127.0.0.1", port), Counting).serve_forever()
