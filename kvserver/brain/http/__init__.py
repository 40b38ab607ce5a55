"""Health, metrics, status page and operators' commands over HTTP."""
