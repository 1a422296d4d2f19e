"""`ospruner app`: one question, the base as it is and pruned, side by side in a browser."""
