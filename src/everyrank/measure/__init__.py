"""Clock, bootstrap intervals and provenance; measures step phases, memory, resources and traces.

Nothing here runs inside a timed region.
"""
