"""Stage 1: run the frozen target over conversations and write its hidden states to a store."""
