"""Benchmarks that are run from a checkout; nothing here is installed."""
