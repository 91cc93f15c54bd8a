"""One file per case; each has `run(setting) -> CaseResult`."""
