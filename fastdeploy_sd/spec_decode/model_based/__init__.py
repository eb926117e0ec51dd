"""Drafting methods with a model."""
