"""Structured output: what clients ask for -> a grammar as text -> matchers over the vocabulary. Knows no model."""
