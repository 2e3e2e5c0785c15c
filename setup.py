"""Refuses `pip install .`: conf/, src/train.py and src/runs.py belong to this folder, and a copy would lack them."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Refused(bdist_wheel):
    def run(self) -> None:
        raise SystemExit("lockstep is used from its folder; type pip install -e . in it")


setup(cmdclass={"bdist_wheel": Refused})
