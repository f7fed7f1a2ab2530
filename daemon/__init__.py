"""The ckptfs process: configuration, command line, control socket, background work, lifetime."""
