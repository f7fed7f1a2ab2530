"""`python -m ckptfs.daemon` is `ckptfs`."""

from ckptfs.daemon.cli import main

if __name__ == "__main__":
    main()
