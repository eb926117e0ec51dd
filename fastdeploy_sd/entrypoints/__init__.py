"""How users reach the engine: the HTTP API (openai/), the launcher, and the parts of the offline LLM."""
