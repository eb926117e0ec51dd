"""Sharing requests among instances through Redis; docs/adr/0024 has the whole of it."""
