"""Draft heads over the target's newest hidden row: Medusa, Hydra, MLP speculators."""
