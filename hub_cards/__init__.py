"""Cards, publishing on the Hub in one commit, and verifying what is published."""
