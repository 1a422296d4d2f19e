"""The embedded reasoner: problems, a fallible solver to imitate, recipe, gates, weights, demo."""
