"""`python -m rankmoe`, the same as the `rankmoe` command."""

from rankmoe.cli import main

if __name__ == "__main__":
    main()
