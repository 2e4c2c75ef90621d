"""Models as step functions over `Ops`, one file each."""
