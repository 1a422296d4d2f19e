"""Policies as models of lm-evaluation-harness, and our tasks in it."""
