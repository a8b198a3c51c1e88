"""Files: atomic writing, one writer per folder, downloads from the Hub."""
