"""Benchmarks: how fast a configuration is on this machine, as JSON records and tables. See docs/benchmarks.md."""
