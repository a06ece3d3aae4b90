"""``python -m attngrad`` is the command ``attngrad``."""

from attngrad.cli import main

if __name__ == "__main__":
    main(prog_name="attngrad")
