# Which C++20 compiler builds the core. Sourced by setup.sh after common.sh.

# compiles COMPILER: whether it builds a C++20 shared object with threads, as the core needs.
compiles() {
  probe_folder=$venv/compiler-probe
  mkdir -p "$probe_folder"
  cat >"$probe_folder/probe.cpp" <<'CODE'
#include <concepts>
#include <span>
#include <thread>
template <std::integral T> T last(std::span<const T> values) { return values.back(); }
extern "C" int probe(const int* values, unsigned count) {
  int result = 0;
  std::thread worker([&] { result = last(std::span<const int>(values, count)); });
  worker.join();
  return result;
}
CODE
  "$1" -std=c++20 -O2 -fPIC -pthread -shared "$probe_folder/probe.cpp" -o "$probe_folder/probe.so" &&
    "$venv/bin/python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$probe_folder/probe.so"
}

# The compiler of the package `ziglang` (clang and its own C++ library). Wrappers name .venv's Python
# by its absolute path, since a build in isolation would not see the package.
# - `-target` is explicit because the default is this very processor, and one build of the core must
#   run everywhere and give the same bits. 2.28 is the oldest C library that NumPy's wheels support.
# - C++ code is compiled as it is with other compilers: no traps that zig adds to unoptimised code.
install_zig() {
  "$venv/bin/python" -m pip install "ziglang==0.17.*" || return 1
  libc=$("$venv/bin/python" -c 'import platform; print(platform.libc_ver()[0])')
  [ "$libc" = glibc ] && libc=gnu.2.28 || libc=musl
  zig_folder=$venv/zig
  link_python_headers "$zig_folder/include" || return 1
  flags="-target $(uname -m)-linux-$libc -fno-sanitize=undefined -isystem '$zig_folder/include'"
  write_zig_wrapper cc "$flags"
  write_zig_wrapper c++ "$flags"
  write_zig_wrapper ar
  write_zig_wrapper ranlib
  compiles "$zig_folder/c++"
}

# write_zig_wrapper TOOL [FLAGS]
write_zig_wrapper() {
  cat >"$zig_folder/$1" <<WRAPPER
#!/bin/sh
export ZIG_GLOBAL_CACHE_DIR='$zig_folder/cache'
exec '$venv/bin/python' -m ziglang $1 ${2:-} "\$@"
WRAPPER
  chmod +x "$zig_folder/$1"
}

# Debian's Python.h includes <x86_64-linux-gnu/python3.x/pyconfig.h>, which a compiler of its own C
# library does not look for in the system's folder. Link that one folder, not all of the system's headers.
link_python_headers() {
  mkdir -p "$1"
  "$venv/bin/python" - "$1" <<'CODE'
import sys, sysconfig
from pathlib import Path

include = Path(sysconfig.get_paths()["include"])
architecture = sysconfig.get_config_var("MULTIARCH")
if architecture and (real := include.parent / architecture / include.name).is_dir():
    link = Path(sys.argv[1]) / architecture / include.name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(real)
CODE
}

# Sets and exports CXX (and what CMake cannot find by itself), and $compiler_name for messages.
choose_compiler() {
  for CXX in ${CXX:+"$CXX"} c++ g++ clang++ g++-15 g++-14 g++-13 g++-12 g++-11 g++-10 \
    clang++-21 clang++-20 clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14; do
    if command -v "$CXX" >/dev/null 2>&1 && compiles "$CXX" >>"$log" 2>&1; then
      compiler_name=$CXX
      export CXX
      forget_other_compiler
      return 0
    fi
  done
  step "no C++20 compiler on PATH: taking one from PyPI (ziglang; the first time about two minutes)" \
    install_zig || die "no C++20 compiler; install one, e.g.: apt install g++"
  compiler_name="zig c++"
  CC=$zig_folder/cc
  CXX=$zig_folder/c++
  CMAKE_ARGS="${CMAKE_ARGS:-} '-DCMAKE_AR=$zig_folder/ar' '-DCMAKE_RANLIB=$zig_folder/ranlib'"
  # Module scanning would need clang-scan-deps, which the package doesn't carry.
  CMAKE_ARGS="$CMAKE_ARGS -DCMAKE_CXX_SCAN_FOR_MODULES=OFF"
  export CC CXX CMAKE_ARGS
  forget_other_compiler
}

# CMake keeps the compiler it first saw: after a change of compiler the old build folder must go.
forget_other_compiler() {
  if [ "$(cat "$venv/build-compiler" 2>/dev/null)" != "$CXX" ]; then
    rm -rf "$venv/build"
    printf '%s\n' "$CXX" >"$venv/build-compiler"
  fi
}
