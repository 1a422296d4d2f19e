"""`python -m ospruner.cli`: the same as `ospruner`."""

from . import main

main()
