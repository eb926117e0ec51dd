"""What LLM needs from the terminal: Ctrl-C at a safe moment, and a progress bar."""
