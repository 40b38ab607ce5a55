"""A file with a secret, as the server asks for it: nobody else may read it."""

from pathlib import Path


def private_file(path: Path, secret: str) -> Path:
    """Writes it, with mode 0600 from the beginning."""
    path.touch(mode=0o600)
    path.write_text(secret)
    return path
