"""The engine in its own process: messages, the loop that serves them and the client."""
