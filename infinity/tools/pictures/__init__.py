"""Drawn timelines: as a picture by matplotlib, as a page for a browser."""
