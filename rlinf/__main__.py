"""The program ``rlinf``, also ``python -m rlinf``; nothing is imported before it can be stopped."""


def main() -> int:
    """Run the command of this process and return its exit code."""
    try:
        from rlinf.cli.main import main as run
    except KeyboardInterrupt:  # while libraries are imported, which takes half a second
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
