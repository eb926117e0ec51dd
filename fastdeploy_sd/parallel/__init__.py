"""Tensor parallel: what part of a model a rank has, and how ranks exchange bytes."""
