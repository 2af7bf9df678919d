"""Late-interaction models: one vector per token, compared by MaxSim."""
