"""The commands: they parse, call the library, and print."""
