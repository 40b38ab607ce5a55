"""Stores that many machines share, behind one contract: how a chunk lies there, and a client for each kind of store.

Nothing here decides what is stored or asked for, and nothing here knows the index or the arena. `chunk_value` is the
format, `store` the contract, and each other module is one kind of store behind it.
"""
