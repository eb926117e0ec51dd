"""The OpenAI-compatible HTTP API over an engine client. Knows no tensors and no Paddle."""
