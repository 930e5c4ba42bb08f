"""What serve.py serves with: the model, the pages of its cache, the engine, text."""
