"""`python -m llmbuild` is the same as the command `llmbuild`."""

from llmbuild.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
