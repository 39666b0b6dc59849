"""``python -m meshwise``."""

from meshwise.cli.main import main

if __name__ == "__main__":
    main()
