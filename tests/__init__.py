"""A regular package, as packages of others that ship a `tests` of theirs would else be imported in its place."""
