"""The one place that states the version; the build reads it and compiles it into `_ext`."""

__version__ = "0.1.0.dev0"
