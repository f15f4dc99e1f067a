"""`python -m bapipe`: the command line where no script was installed."""

from bapipe.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
