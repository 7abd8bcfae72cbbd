"""The clock, intervals and provenance; instruments for phases, traffic, memory, resources and traces.

Nothing here runs inside a timed region.
"""
