"""What only a GPU can tell."""
