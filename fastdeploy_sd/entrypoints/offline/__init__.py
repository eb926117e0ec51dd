"""The parts of the offline LLM: arguments, conversations, the run of a batch, Ctrl-C and a progress bar."""
