"""Problems: where they come from, how they are asked."""
