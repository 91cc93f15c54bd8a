"""Everything a run writes to disk or shows: nothing else in jaxft opens a file for writing."""
