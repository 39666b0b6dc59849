"""meshwise: know how to split your training before you pay for it, and prove it by running it."""

__version__ = "0.1.0"
