"""Measure: clock and intervals, traffic, provenance. Nothing here runs inside a timed region."""
