"""Fixtures shared by all tests: tiny targets, a tiny tokenizer and small conversations, made on the spot."""
