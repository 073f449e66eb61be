"""Ask questions about long local documents on a small GPU or a CPU, offline."""

__version__ = "0.1.0"
