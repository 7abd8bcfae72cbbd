"""`everyrank bench`: times layouts in turns, after verifying each. Only equal layouts are timed.

comm_counter.py    counts collectives by operation and bytes
instrumented.py    profiles one layout: peak memory, communication volume, exposed communication
results.py         the results of each layout so far, and their Records
rank.py            what one rank does: verify, profile, warm up, and time in turns
"""
