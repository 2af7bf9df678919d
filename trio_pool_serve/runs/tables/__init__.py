"""Tables in files: reading rows, and writing them up to positions from which writing can resume."""
