"""Random training programs, run under plain torch and under every strategy, and compared."""
