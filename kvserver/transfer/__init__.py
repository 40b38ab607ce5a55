"""How bytes move: layouts (pure) and the engines that copy (native)."""
