"""Chooses which drafts of which source each step verifies, by their gain and cost. Knows no engine."""
