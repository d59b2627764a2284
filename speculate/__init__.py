"""Speculative decoding with a target and a drafter, and the acceptance length it reaches."""
