"""The version, where everything may import it from."""

__all__ = ["__version__"]

__version__ = "0.2.0"
