"""The command `relpos`: a class a subcommand (`command.py`), in a file a group of subcommands.

A class declares a subcommand's options and its help, and its `run` imports the job and starts it.  Nothing heavy is
imported before that, so that every `--help` answers at once.
"""
