"""`python -m turnstile`: the command line."""

from turnstile.cli.main import main

main()
