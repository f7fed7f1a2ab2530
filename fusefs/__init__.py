"""The POSIX face of ckptfs: inodes, namespace, reads and writes, and the kernel session."""
