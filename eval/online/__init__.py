"""Online evaluation: real generation with a stopping rule, resumable, compared with replay."""
