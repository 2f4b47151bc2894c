"""Installs relpos_fairseq; settings of the tools are in pyproject.toml."""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
VERSION_FILE = ROOT / "relpos_fairseq" / "version.py"


def read_version() -> str:
    """Reads the version without importing the package, which would need torch."""
    match = re.search(r'^__version__ = "([^"]+)"$', VERSION_FILE.read_text(encoding="utf-8"), re.M)
    if match is None:
        raise ValueError(f'no __version__ = "..." in {VERSION_FILE}')
    return match.group(1)


def read_readme() -> str:
    """Reads the README, if this copy has one."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


class Build(build_py):
    """Puts a folder without code beside fairseq for an editable install, for which nothing else is copied."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            beside = Path(self.get_finalized_command("install").install_lib, "relpos_fairseq")
            beside.mkdir(parents=True)
            (beside / "editable.txt").write_text(
                "Here fairseq finds --user-dir relpos_fairseq; the code is elsewhere.\n"
            )


class Source(sdist):
    """Leaves out tests/test*.py, which setuptools adds without the folders that they need."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, [file for file in files if not file.startswith("tests")])


# A wheel has examples/ in the package. fairseq looks for `--user-dir relpos_fairseq` in the working folder and
# beside itself, where a wheel's package lies. Of an editable install a folder without code lies there, and the root is
# on Python's path: a folder without __init__.py yields to a package further on (but not to setuptools' finder,
# which would come after the path, so that package_dir asks for the path).
EDITABLE = "editable_wheel" in sys.argv

# fairseq itself is not listed. Two distributions provide the module `fairseq`: the old release
# `fairseq`, which neither imports on Python 3.11 nor passes today's pip, and `fairseq-fixed`, which
# declares a dependency (torchaudio) that nothing here needs. Naming one would install it over the
# other; the README says which to choose, and scripts/install.sh installs it.
# The versions that are tested are pinned in scripts/requirements.txt.
REQUIRES = [
    "torch>=2.6",  # checkpoints are loaded with weights_only=True
    "numpy<2.4",  # fairseq calls np.percentile(interpolation=...)
    "hydra-core>=1.3,<1.4",
    "omegaconf>=2.3,<2.4",
    "sacrebleu>=2",
    "regex",
    "langcodes>=3.5",  # scripts of languages: 3.5 has them without its extra
    "tqdm",
    "bitarray",
    "scikit-learn",
    "packaging",
    "filelock>=4.1",  # forked workers do not inherit its locks
    "shtab>=1.7",  # relpos completion
]

# Where several install a package, a command that misses it names the first.
EXTRAS = {
    "fairseq": ["fairseq-fixed==0.12.3.1"],
    "plot": ["matplotlib"],
    "data": ["sentencepiece>=0.2", "protobuf", "sacremoses", "subword-nmt", "tokenizers>=0.20", "requests"],
    "convert": ["safetensors", "tokenizers>=0.20", "sentencepiece>=0.2", "protobuf"],
    "ct2": ["ctranslate2>=4.8.3"],
    "onnx": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5"],
    "lm-eval": ["lm-eval>=0.4.13"],  # beside transformers 4: datasets<5 and huggingface_hub<1
    "transformers": ["transformers>=4.44", "safetensors"],
    "compare": ["jinja2", "matplotlib", "pyyaml", "sentencepiece", "sacremoses", "scipy", "tabulate"],
    "slurm": ["submitit>=1.5"],
    "benchmark": ["matplotlib", "sentencepiece"],
}
EXTRAS["all"] = sorted({package for extra in EXTRAS.values() for package in extra})
EXTRAS["comet"] = ["unbabel-comet>=2.2.7", "setuptools<81"]  # not in `all`: its numpy<2 and protobuf<5 exclude onnx
EXTRAS["test"] = [
    "pytest>=8",
    "pytest-xdist",
    "pytest-timeout",
    "coverage",
    "hypothesis",
    "ruff",
    "sentencepiece",
    "matplotlib",
]

setup(
    name="relpos_fairseq",
    version=read_version(),
    description="Position encodings for fairseq's Transformers: one option, any scheme",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["relpos_fairseq", "relpos_fairseq.*"])
    + ([] if EDITABLE else ["relpos_fairseq.examples"]),
    package_dir={"": "."} if EDITABLE else {"relpos_fairseq.examples": "examples"},
    package_data={  # pages too: the plugin reads patches/README.md
        "relpos_fairseq": ["py.typed", "**/*.md", "**/*.json", "**/*.jinja", "**/*.c", "**/*.h"],
        "relpos_fairseq.examples": [f"**/*.{kind}" for kind in "md yaml sh sbatch py".split()],
    },
    cmdclass={"build_py": Build, "sdist": Source},
    python_requires=">=3.10",
    install_requires=REQUIRES,
    entry_points={
        "console_scripts": [
            "relpos = relpos_fairseq.cli.main:main",
            "relpos-lm-eval = relpos_fairseq.evaluation.harness:main",
        ]
    },
    extras_require=EXTRAS,
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
