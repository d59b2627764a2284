"""One module a command; each parses, calls one function and prints. Heavy packages are imported inside the command."""
