"""What calls take of the host: the first of a program, and each after it."""
