"""Labels: traces with a forced, graded answer at each step; made, kept, read, looked at."""
