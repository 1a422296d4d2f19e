"""`python -m ospruner_cli`: the same as `ospruner`."""

from . import main

main()
