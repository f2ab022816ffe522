"""`python -m preft_cli`."""

from preft_cli.app import main

main()
