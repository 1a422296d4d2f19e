"""OS-Pruner: stops a reasoning model at the right paragraph of its thinking."""
