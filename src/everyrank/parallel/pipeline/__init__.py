"""Pipeline parallel: the blocks of a model are split into stages, and micro-batches pass through them.

balance.py    stages of about equal cost
schedule.py   the order of the actions of each rank
blocks.py     placeholders for the blocks of other stages
stage.py      one stage of a model
deferred.py   weight gradients that wait for an idle moment
run.py        run a schedule: computation, and messages between stages
"""
