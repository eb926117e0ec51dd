"""Limits and ranges of requests and sampling parameters, each stated once."""
