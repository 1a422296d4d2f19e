"""What is said about artefacts: where they come from (`facts`) and their model cards (`render`)."""
