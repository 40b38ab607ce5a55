"""Messages between client and brain (messages.py), and between brain, movers and supervisor (orders.py)."""
