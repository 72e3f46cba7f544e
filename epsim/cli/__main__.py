"""`python -m epsim.cli`."""

from epsim.cli.main import main

main()
