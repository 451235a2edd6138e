"""``python -m fp8_aot.aot``: the ``fp8-aot`` command."""

from fp8_aot.aot.cli import main

if __name__ == "__main__":
    main()
