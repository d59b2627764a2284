"""Stage 2: train a DFlash drafter from a store with compiled flex_attention."""
