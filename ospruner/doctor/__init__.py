"""`ospruner doctor`: what is installed, what is known of a base, what is wrong."""
