"""Building blocks of decoders: each holds its weights and calls one or two ops. Knows no checkpoint names."""
