"""The documentation, examples, benchmarks and tools of this checkout."""
