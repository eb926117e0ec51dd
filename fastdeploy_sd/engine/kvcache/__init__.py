"""Which block of the KV cache holds which tokens. Pure Python: knows block ids, never their tensors."""
