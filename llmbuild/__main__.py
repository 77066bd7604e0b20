"""`python -m llmbuild`: the same as the `llmbuild` command."""

from llmbuild.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
