"""Procedural world that trains the embedded demo model."""
