"""The version of a checkout. A build with pip installs the git tag's in this file's place."""

__version__ = "0.0"
