"""The store: what stage 1 writes and stage 2 reads, a plain zarr v3 group."""
