"""A bench: layouts timed in turns; only what was checked equal gets a number.

comm_counter.py    collectives counted, by kind and bytes
instrumented.py    peak memory, what travels and exposed communication of one layout
results.py         what is known of each layout while a bench goes on, and its Records
rank.py            what one rank does: check, look into, warm up, and time in turns
"""
