"""What is chosen and lowered before anything runs: plans, explain, programs."""
