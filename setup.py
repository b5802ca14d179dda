"""The compiled CPU kernels (headway/native): one small C library per instruction set, plain shared objects that know nothing of Python.

They are optional: where no compiler is there or it fails, a warning is printed and the engine runs on PyTorch alone.

And the speculators that ship with Headway: speculators/ of the checkout becomes headway/speculators/ of a wheel.
"""

import os
import platform
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

_SOURCES = ("attention", "draft", "elementwise", "experts", "linear", "parallel", "plan", "sampling", "stack")
SOURCES = [f"src/headway/native/{name}.c" for name in _SOURCES]
_HEADERS = ("attention_impl", "each_type", "elementwise_impl", "kernels", "linear_tiles", "parallel", "simd", "stack", "tiles")
HEADERS = [f"src/headway/native/{name}.h" for name in _HEADERS]
SPECULATORS = [path for pattern in ("config.json", "model.safetensors", "README.md") for path in Path("speculators").glob(f"*/{pattern}")]
INTERFACE = runpy.run_path("src/headway/native/interface.py")["checksum"]()
COMMON = [f"-DINTERFACE={INTERFACE}u", "-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
FLAGS = {
    "x86_64": {
        "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"], "avx512_bf16": AVX512_BF16,
        "avx512_vnni": [*AVX512, "-mavx512vnni"], "avx512": AVX512, "avx2": AVX2,
    },
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}
if os.environ.get("HEADWAY_SANITIZE"):
    COMMON += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]

if os.environ.get("HEADWAY_EMULATE_TILES"):   # every library takes the way through tiles, for tests
    COMMON += ["-DEMULATE_TILES"]
    FLAGS["x86_64"].pop("amx")


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """Without Python's suffix: one build serves every Python."""
        return fullname.replace(".", "/") + ".so"


class BuildWithSpeculators(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:   # a checkout reads its own
            for path in SPECULATORS:
                self.mkpath(str(Path(self.build_lib, "headway", path).parent))
                self.copy_file(str(path), str(Path(self.build_lib, "headway", path)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(Path(self.build_lib, "headway", path)) for path in SPECULATORS)]


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            f"headway.native._kernels_{variant}", SOURCES, depends=HEADERS, extra_compile_args=COMMON + flags, libraries=["m", "pthread"],
            extra_link_args=[flag for flag in COMMON if flag.startswith("-fsanitize")], optional=True,
        )
        for variant, flags in FLAGS.get(platform.machine(), {}).items()
        if sys.platform != "win32"
    ],
    cmdclass={"build_py": BuildWithSpeculators, "build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
