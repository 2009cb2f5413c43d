"""`python -m deepytorch.cli` is the command `deepytorch`."""

from deepytorch.cli import main

if __name__ == "__main__":
    main()
