"""Seeded fuzzers of a running server, each with a fixed budget as a test and an open-ended mode as a program."""
