"""`python -m tests.e2e.scheduler_sim --seeds N --seed0 K [--events 400]`: exit status 1 if a seed failed."""

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.rigs.seeds import options_of, run_all

from .run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.scheduler_sim", description=__doc__)
    parser.add_argument("--beside", action="store_true", help="another connector in all of them, which fails at times")
    parser.add_argument("--awaits", action="store_true", help="other engines in all of them, whose chunks are awaited")
    parser.add_argument("--model", type=Path, help="folder of a llama; without it one is made")
    options = vars(options_of(parser, seeds=200, seed0=0, events=400))
    model, beside, awaits = options.pop("model"), options.pop("beside"), options.pop("awaits")
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            subprocess.run([sys.executable, "-m", "tests.e2e.models", folder, "llama"], check=True, timeout=120)
        run = partial(run_seed, model=model or Path(folder) / "llama", beside=beside, awaits=awaits)
        return run_all(run, parser.prog + " --beside" * beside + " --awaits" * awaits, **options)


if __name__ == "__main__":
    sys.exit(main())
