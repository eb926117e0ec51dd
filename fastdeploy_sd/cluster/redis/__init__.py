"""Sharing requests among instances through Redis; docs/deployment.md says what clients see."""
