"""`python -m infinity`, and `torchrun ... -m infinity train swap.toml`."""

from infinity.tools.cli import main

if __name__ == "__main__":
    main()
