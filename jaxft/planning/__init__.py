"""Plans of runs for hardware that is not here: what compilers for GPUs and TPUs say about the programs of a run."""
