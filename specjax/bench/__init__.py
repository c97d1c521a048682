"""Benchmarks: plain decoding against every drafter, and one step's cost by its size."""
