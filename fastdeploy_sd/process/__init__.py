"""Processes and files of a server: children, sandboxed workers, signs of life, log lines and files."""
