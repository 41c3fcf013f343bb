"""Studies: several methods on the same data with several seeds, each run in a folder of its own."""
