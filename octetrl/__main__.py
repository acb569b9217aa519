"""`python -m octetrl` is the `octetrl` command."""

from octetrl.cli.main import main

if __name__ == "__main__":
    main()
