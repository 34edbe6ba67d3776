"""What is durable, as plain synchronous code: records, commands, the engine, and the pen that
batches.

Knows nothing of trio. Time and ids are handed in (`identity`). Nothing above this folder writes
SQL.
"""
