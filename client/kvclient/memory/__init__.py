"""The engine's memory as the server reads and writes it: layouts, blocks, device buffers."""
