"""The command line: `verbs` has a file a command, behind a dispatcher that imports nothing heavy."""
