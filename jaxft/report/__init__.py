"""Pages about runs: reads run directories, and writes reports and comparisons of them. Imports no jax."""
