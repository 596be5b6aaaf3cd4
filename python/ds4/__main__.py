"""`python -m ds4` is `ds4py`."""

from ds4.cli import main

if __name__ == "__main__":
    main(prog_name="python -m ds4")
