"""The subcommands of `pdperf`, one a module: each adds its arguments to the parser and runs."""
