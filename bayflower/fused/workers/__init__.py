"""The fused engine on several processes, which may be on several machines.

blocks.py   which clients belong together, where each block of them is, and when one moves
cargo.py    what travels: trees as arrays, sums, what a round shows of its clients
worker.py   one worker: blocks of clients with their data and states, trained as the engine does
crew.py     the workers as Ray actors: started, called, and found dead
herd.py     all clients of one kind on the workers: a round, a test, moves, and what a death costs
run.py      a run whose clients are on workers

Numbers depend on the blocks, never on how many workers there are or which of them has a block.
Only `crew.py` imports Ray, when it is asked for workers.
"""
