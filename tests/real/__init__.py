"""Tests on trained models, which `scripts/dev test --real` fetches."""
