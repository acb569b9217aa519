"""Several environments in one run: their tasks in one order, and each task back to its own score and replies."""
