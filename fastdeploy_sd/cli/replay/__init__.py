"""What a model-free drafting method would have gained on recorded texts: no model runs, the answers are known.

Greedy verification accepts the drafts that the recorded answer continues with, so the recording alone says how many
tokens each step would have given. Knows the proposers' interface and tokenizers; knows no engine.
"""
