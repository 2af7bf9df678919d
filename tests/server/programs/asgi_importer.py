"""A program, not hypercorn, whose child imports ``trio_pool_serve.asgi``; prints the child's exit status."""

import importlib
import multiprocessing
import sys

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=importlib.import_module, args=("trio_pool_serve.asgi",))
    child.start()
    child.join()
    sys.stdout.write(f"{child.exitcode}\n")
