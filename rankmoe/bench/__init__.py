"""Benchmarks: cases, timing, one JSON record a run."""
