"""Drafting methods without a model."""
