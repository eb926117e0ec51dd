"""The OpenAI-compatible HTTP API over an engine client. Knows HTTP and OpenAI's JSON; knows no tensors and no Paddle."""
