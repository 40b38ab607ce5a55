"""Clients and settings that are wrong, by mistake or on purpose."""
