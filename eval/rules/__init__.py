"""Rules by name, and what they do on labelled traces."""
