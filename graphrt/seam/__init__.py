"""The one seam between servers and the engine process: shared-memory rings of msgspec records."""
