"""What public calls mean, on any backend: values, derivatives, errors."""
