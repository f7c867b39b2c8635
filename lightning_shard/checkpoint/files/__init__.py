"""The files of a portable checkpoint: names, contents, checks and atomic publishing."""
