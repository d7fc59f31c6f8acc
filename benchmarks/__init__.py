"""Measurements: each prints a comparison that was made in one run."""
