"""What a checkpoint needs: a flat set of files, which a Hub repository can carry whole."""
