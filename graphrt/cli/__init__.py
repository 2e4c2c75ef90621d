"""The `graphrt` command: one module per subcommand, each with `add(subparsers)` and `run(args) -> exit code`."""
