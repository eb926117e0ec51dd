"""Bytes between processes: the codec, packed arrays, secrets, signatures and sockets."""
