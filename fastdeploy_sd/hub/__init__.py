"""Finds models by name in a hub's cache on this machine, or fetches them. Loads and executes nothing."""

from __future__ import annotations

from fastdeploy_sd.hub.location import located

__all__ = ["located"]
