"""`kvserver doctor`: is this machine ready?"""
