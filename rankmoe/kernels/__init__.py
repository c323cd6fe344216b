"""Device code, one stem per operation; the operation of the same name in the package calls it."""
