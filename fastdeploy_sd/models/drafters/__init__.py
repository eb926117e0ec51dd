"""Draft models: what opens their weights and runs their passes, by kind."""
