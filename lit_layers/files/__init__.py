"""What is read and written safely: whole files, folders with one writer, downloads, and files that others made."""
