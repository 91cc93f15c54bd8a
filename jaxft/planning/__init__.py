"""Plans of a run before it runs: memory, work and traffic, from the text of compiled programs."""
