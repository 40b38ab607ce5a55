"""Stores of whole objects behind one small contract: S3, Google, Azure, and what others plug in.

`driver` is the contract, `store` lays chunks, notes and announcements out in objects.
`clouds` and `plugin` are drivers.
"""
