"""The content-addressed store of ckptfs: chunks, segments, index, versions. Knows nothing of FUSE."""
