"""Reading traces: what each step waited for, and what bounds it. See docs/TRACE.md."""
