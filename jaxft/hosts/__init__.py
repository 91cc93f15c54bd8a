"""Several processes of one run: they find each other, exchange what each has sampled, and end together."""
