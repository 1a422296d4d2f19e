"""Model cards, publishing on the Hub in one commit, and verifying what is published.

cards     the card of a policy, and of labels
staging   the exact folder that is published
publish   `ospruner.publish`
probes    what a policy says about three fixed prompts
verify    `ospruner.verify`
"""
