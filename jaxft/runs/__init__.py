"""Output of a run: its directory, checkpoints, metrics and plots, and the console."""
