"""The console entry point; `python -m infinity`, and `torchrun ... -m infinity train swap.toml`."""

import signal


def main() -> None:
    """Runs the command line. Until a command runs, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from infinity.tools.cli import main as run

    run()


if __name__ == "__main__":
    main()
