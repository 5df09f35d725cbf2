"""The compiled programs, a file each."""
