"""Many jobs of one question: run, kept, and compared."""
