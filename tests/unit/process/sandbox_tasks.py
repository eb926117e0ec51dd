"""What the workers of the tests do."""

from __future__ import annotations

import os
import time

from fastdeploy_sd.process.sandbox_worker import Handle, Note, Setup


def load(config: str) -> Setup:
    loaded_by = os.getpid()

    def setup(first: bytes, note: Note) -> Handle:
        def handle(name: str, payload: bytes) -> bytes:
            note(f"at {name}" if payload == b"noted" else "")
            match name:
                case "echo":
                    return payload
                case "said":
                    return f"{config} {first.decode()} {loaded_by != os.getpid()}".encode()
                case "pid":
                    return str(os.getpid()).encode()
                case "nice":
                    return str(os.nice(0)).encode()
                case "hold":
                    return str(len(bytearray(int(payload)))).encode()
                case "sleep":
                    time.sleep(1000)
            while True:  # "spin"
                pass

        return handle

    return setup
