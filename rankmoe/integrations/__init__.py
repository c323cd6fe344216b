"""Doors into other libraries. Each module needs its library; nothing else of this package imports any of them."""
