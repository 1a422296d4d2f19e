"""`ospruner doctor`: what is installed, what is known of a base or a policy, what is wrong."""
