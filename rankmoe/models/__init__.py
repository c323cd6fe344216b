"""Models built from the library's own block."""
