"""The version, kept where the build reads it without importing anything heavy."""

__version__ = "0.1.0.dev0"
