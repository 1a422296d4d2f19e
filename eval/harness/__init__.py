"""Policies as models of other people's evaluation harnesses."""
