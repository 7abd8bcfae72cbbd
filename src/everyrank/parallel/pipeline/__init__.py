"""Pipeline parallel: the blocks of a model cut into stages, and micro-batches that go through them.

balance.py    stages of about equal cost
schedule.py   which rank does what when
blocks.py     what stands in the place of a block
stage.py      one stage of a model
deferred.py   weight gradients that wait for an idle moment
run.py        run a schedule: computation, and messages between stages
"""
