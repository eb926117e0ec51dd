"""Turning a step's logits into output tokens; knows no models, no scheduling and no requests beyond their row."""
