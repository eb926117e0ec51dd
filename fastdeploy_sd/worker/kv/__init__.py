"""KV memory, its blocks, and how they leave and enter it."""
