"""Which drafts of which source are verified in each step: what they are worth, and what they cost. Knows no engine."""
