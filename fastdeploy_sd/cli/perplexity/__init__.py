"""Perplexity of a text under a model, and how far another format of the model is from it. Knows no server."""
