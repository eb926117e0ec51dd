"""The requests that wait or run, and what the engine keeps of each."""
