"""What this machine has and lacks for graphrt, with the command that gets it."""
