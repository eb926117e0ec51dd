"""Where users meet the engine: HTTP (openai/) and the text handling (text/) that it shares with the offline LLM."""
