"""Model code, one file per family."""
