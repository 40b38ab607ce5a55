"""The remote tier: chunks that come from a store which other servers use too, and go there."""
