"""Several processes that compute one model: how they are started, what they tell each other, how they end."""
