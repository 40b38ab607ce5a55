"""What is said: between client and brain (messages.py), between brain, movers and supervisor (orders.py)."""
