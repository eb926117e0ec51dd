"""Declared ops, recorded passes and how they run."""
