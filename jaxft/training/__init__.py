"""Training on trajectories: token rows, batches with advantages, and the learner that runs a job's updates."""
