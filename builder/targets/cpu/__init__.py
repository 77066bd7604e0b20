"""The cpu target. `target.py` is the way in; `lower/table.py` lists what it can lower; `native/` are its operators."""
