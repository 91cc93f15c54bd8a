"""Language models behind the contract of `jaxft.core.types.Model`, and the file formats of their weights."""
