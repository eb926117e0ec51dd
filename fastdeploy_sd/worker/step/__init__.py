"""One step: batch, forward pass, verification, drafts."""
