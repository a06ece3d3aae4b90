"""What every layer shares: the tables that the rest derives from."""
