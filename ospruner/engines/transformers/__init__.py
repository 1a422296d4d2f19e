"""The embedded engine: any causal LM of transformers, with a decode loop of its own."""
