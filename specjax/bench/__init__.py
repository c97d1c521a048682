"""Benchmarks: plain decoding against every drafter and peers, a step's profile, and the five times of the rule `goodput`."""
