"""The command's other programs, the benchmarks and the README's examples, run as users run them."""
