"""Whole methods compared: areas under frontiers, gaps closed, and how far they could be."""
