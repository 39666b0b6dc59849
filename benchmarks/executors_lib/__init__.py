"""Parts of ``benchmarks/executors.py``: executors of meshwise timed beside hand-written loops and other libraries."""
