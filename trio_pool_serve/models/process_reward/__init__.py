"""Process reward models: one score per step of a solution."""
