"""Real clients as their users run them: programs in environments of their own, against a server on the demo model."""
