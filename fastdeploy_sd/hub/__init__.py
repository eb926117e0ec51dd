"""Models by name: finds a model in a hub's cache on this machine, or fetches it. Loads nothing and executes nothing."""

from __future__ import annotations

from fastdeploy_sd.hub.location import located

__all__ = ["located"]
