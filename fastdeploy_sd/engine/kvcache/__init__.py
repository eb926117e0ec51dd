"""Which block of the KV cache holds which tokens. Pure Python: knows block ids, never the tensors behind them."""
