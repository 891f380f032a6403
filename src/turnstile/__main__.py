"""The command line, run as `python -m turnstile`."""

from turnstile.cli.main import main

main()
