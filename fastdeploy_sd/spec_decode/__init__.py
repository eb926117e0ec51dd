"""Methods that guess the next tokens. The engine judges every guess; a method can be slow, never wrong."""
