"""The engine's part of prefill and decode on different instances: prompts computed for others, or by others."""
