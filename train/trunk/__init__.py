"""How the frozen base runs over labelled traces: batches, packing, what is kept of its states."""
