"""What one rank does for each task. The ranks call these; a person's own process starts them (api.py).

train.py           train, or evaluate what was trained
predict.py         what a model says of each sample, in their order
predictions.py     the files of predictions
verify.py          compare layouts with one device
bench.py           time layouts in turns
comm.py            time and check collectives, on one backend or on several in turns
bench_results.py   what is known of each layout while a bench goes on, and its Records
"""
