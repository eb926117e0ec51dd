"""GGUF files: their container, and what their metadata mean in the words of Hugging Face."""
