"""Two-stage offline trainer of DFlash drafters: extract hidden states once, train from the store."""
