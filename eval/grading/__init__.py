"""Grading: the boxed answer of a text, and whether it equals the reference."""
