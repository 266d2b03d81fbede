"""Step membership, claims, accumulation, reduction, update, checkpoints, weights."""
