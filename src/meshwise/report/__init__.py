"""Showing what was measured: the terminal's table, the page with its figures, the index.

    load ─► Record … ─► studies ─► Study ─┬─► sheet ──────────────► table (terminal), page
                                          ├─► frames ─► figures ──► page
                                          └─► headline ───────────► page
    write_index, query: records.jsonl ─► index.sqlite

Nothing here runs anything or imports torch; altair and vl-convert are imported when a page is made.
"""
