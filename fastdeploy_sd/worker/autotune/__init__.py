"""Measurements at start: costs of steps, and how the kernels run best here."""
