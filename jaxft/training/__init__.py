"""Training on trajectories, in arrays: rows, batches, advantages, and the job that learns from them."""
