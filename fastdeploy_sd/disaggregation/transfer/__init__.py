"""KV blocks on their way from a prefill to a decode instance."""
