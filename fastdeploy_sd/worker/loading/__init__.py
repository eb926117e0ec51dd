"""From a checkpoint to a model in memory."""
