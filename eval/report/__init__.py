"""Reports: terminal, pictures, tables, one HTML page, and the paper's own numbers."""
