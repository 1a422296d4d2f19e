"""Whole methods compared on stored labels: what `ospruner eval frontier` does."""
