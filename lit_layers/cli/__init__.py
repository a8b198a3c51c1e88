"""The command line: one file a command, behind a dispatcher that imports nothing heavy."""
