"""Operators' commands: clear, pin, warm, drain, reload."""
