"""Methods that guess the next tokens. The engine verifies every guess; a method can be slow, never wrong."""
