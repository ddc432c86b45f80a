#!/usr/bin/python3
"""Checks who includes whom: interfaces.md section 2, 'Who may include whom', and the rules of single files.

    deploy/include_rules.py [ROOT]

Prints one line per violation and exits 1 if there is any. Before it looks at the tree it checks itself on made-up files
that break each rule.
"""
import os
import re
import subprocess
import sys

# Longest matching path decides. Each folder: headers of the project that it may include, then outside libraries.
FOLDERS = {
    "daemon/abi/": (("daemon/abi/",), ()),
    "daemon/client/": (("daemon/abi/", "daemon/client/"), ()),
    "daemon/client/stream.cpp": (("daemon/abi/", "daemon/client/"), ("cuda",)),
    "daemon/weights/": (("daemon/abi/", "daemon/weights/"), ("nlohmann", "openssl")),
    "daemon/moectl/": (("daemon/abi/", "daemon/client/", "daemon/moectl/"), ("nlohmann", "CLI")),
    "kernels/": (("daemon/abi/", "kernels/*.h"), ()),
    "kernels/cpu/": (("daemon/abi/", "kernels/*.h", "kernels/cpu/"), ()),
    "kernels/cuda/": (("daemon/abi/", "kernels/*.h", "kernels/cuda/"), ("cuda", "nccl")),
    "control/": (("daemon/abi/", "control/"), ("boost/asio", "ucx", "openssl")),
    "daemon/": (("daemon/", "kernels/*.h", "control/"),
                ("boost/asio", "nlohmann", "openssl", "ucx", "spdlog", "yaml-cpp", "prometheus", "boost/beast", "CLI")),
    "tests/": (("daemon/", "kernels/", "control/", "tests/"), None),
}

# An outside library: the headers that count as it, and the only files that may include them (None: as the folder says).
LIBRARIES = {
    "spdlog": (r"(spdlog|fmt)/", r"daemon/log\.cpp"),
    "yaml-cpp": (r"yaml-cpp/", r"daemon/config(_\w+)?\.cpp"),
    "prometheus": (r"prometheus/", r"daemon/metrics\.cpp"),
    "boost/beast": (r"boost/beast", r"daemon/http\.cpp"),
    "CLI": (r"CLI/", r"daemon/(moectl/)?main\.cpp"),
    "ucx": (r"(ucp|ucs|uct)/", r"control/ucx\.(h|cpp)"),
    "boost/asio": (r"boost/", None),
    "nlohmann": (r"nlohmann/", None),
    "openssl": (r"openssl/", None),
    "curl": (r"curl/", None),
    "nccl": (r"nccl\.h", None),
    "cuda": (r"(cuda|nvml|cooperative_groups|cub/|nvtx3/)", None),
}

# Text that only some files may hold: what it is, the pattern, where it is looked for, where it is allowed.
TEXTS = [
    ("throw", r"\bthrow\b", r"(daemon/service_loop\.(h|cpp)|daemon/loop\.h|daemon/client/.*\.(h|cpp)|kernels/.*)",
     r"kernels/(cpu|cuda)/backend\.cpp"),
    ("a kernel launch", r"<<<", r".*", r"kernels/cuda/.*"),
    ("inline assembly", r"\basm\b", r".*", r"kernels/cuda/ptx\.cuh"),
]

SOURCES = (".h", ".cpp", ".cu", ".cuh", ".inc")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


def folder_of(path):
    return max((f for f in FOLDERS if path.startswith(f)), key=len, default=None)


def allowed_project(path, header):
    for pattern in FOLDERS[folder_of(path)][0]:
        if pattern.endswith("*.h"):
            prefix = pattern[:-3]
            if header.startswith(prefix) and "/" not in header[len(prefix):]:
                return True
        elif header.startswith(pattern):
            return True
    return False


def check_include(path, quoted, header):
    """One include line -> what is wrong with it, or None."""
    folder = folder_of(path)
    if quoted:
        if "/" not in header or header.startswith("."):
            return f'"{header}": project headers are named from the repository root'
        if path.startswith("daemon/") and header.startswith(("kernels/cpu/", "kernels/cuda/")):
            return f'"{header}": the daemon reaches a back end through kernels/backend.h only'
        return None if allowed_project(path, header) else f'"{header}": {folder} may not include it'
    for library, (pattern, only) in LIBRARIES.items():
        if not re.match(pattern, header):
            continue
        may = FOLDERS[folder][1]
        if may is None:
            return None
        if library not in may:
            return f"<{header}>: {folder} may not use {library}"
        if only and not re.fullmatch(only, path):
            return f"<{header}>: only {only} may include {library}"
        return None
    if "/" in header and not header.startswith(("sys/", "linux/", "netinet/", "arpa/", "net/", "sanitizer/", "gtest/")):
        return f"<{header}>: not a standard, system or known library header"
    return None


def check_file(path, text):
    """-> list of (line number, what is wrong)."""
    if folder_of(path) is None:
        return []
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            fault = check_include(path, match.group(1) == '"', match.group(2))
            if fault:
                faults.append((number, fault))
    code = COMMENT_OR_STRING.sub(lambda m: "\n" * m.group().count("\n"), text)
    for number, line in enumerate(code.splitlines(), 1):
        for what, pattern, where, allowed in TEXTS:
            if path.startswith("tests/") or not re.fullmatch(where, path) or re.fullmatch(allowed, path):
                continue
            if re.search(pattern, line):
                faults.append((number, f"{what} is not allowed here"))
    return faults


BROKEN = [
    ("daemon/abi/a.h", '#include "kernels/heap.h"'),
    ("daemon/abi/a.h", "#include <spdlog/spdlog.h>"),
    ("daemon/abi/a.h", '#include "status.h"'),
    ("daemon/client/a.cpp", '#include "kernels/numbers.h"'),
    ("daemon/client/client.cpp", "#include <cuda.h>"),
    ("daemon/client/client.cpp", "void f() { throw 1; }"),
    ("daemon/weights/a.cpp", '#include "kernels/experts.h"'),
    ("daemon/moectl/a.cpp", '#include "kernels/numbers.h"'),
    ("daemon/moectl/bench.cpp", "#include <CLI/CLI.hpp>"),
    ("kernels/heap.h", '#include "kernels/cpu/passes.h"'),
    ("kernels/cpu/backend.cpp", '#include "control/world.h"'),
    ("kernels/cpu/call_pass.cpp", "if (x) throw std::runtime_error(y);"),
    ("kernels/cpu/a.cpp", "#include <cuda_runtime.h>"),
    ("kernels/cpu/a.cpp", "k<<<1, 2>>>();"),
    ("kernels/cuda/send.cu", 'asm volatile("");'),
    ("control/world.cpp", '#include "kernels/backend.h"'),
    ("control/net_loop.cpp", "#include <ucp/api/ucp.h>"),
    ("daemon/main.cpp", '#include "kernels/cpu/backend.h"'),
    ("daemon/main.cpp", "#include <cuda.h>"),
    ("daemon/main.cpp", "#include <spdlog/spdlog.h>"),
    ("daemon/report.cpp", "#include <yaml-cpp/yaml.h>"),
    ("daemon/http.cpp", "#include <prometheus/counter.h>"),
    ("daemon/metrics.cpp", "#include <boost/beast/http.hpp>"),
    ("daemon/service_loop.cpp", "throw 1;"),
    ("daemon/main.cpp", "#include <folly/Range.h>"),
]
SOUND = [
    ("daemon/abi/a.h", "#include <sys/mman.h>\n#include <cstdint>"),
    ("daemon/log.cpp", "#include <spdlog/spdlog.h>"),
    ("daemon/config_keys.cpp", "#include <yaml-cpp/yaml.h>"),
    ("daemon/http.cpp", "#include <boost/beast/http.hpp>"),
    ("daemon/main.cpp", '#include "kernels/backend.h"\n#include <boost/asio/io_context.hpp>'),
    ("daemon/service_loop.cpp", "// never throw here\nlog(\"throw\");"),
    ("kernels/cpu/backend.cpp", "throw 1;"),
    ("kernels/cuda/ptx.cuh", 'asm volatile("");'),
    ("tests/unit/a_test.cpp", '#include "kernels/heap.h"\n#include <gtest/gtest.h>'),
]


def self_check():
    """Sentences about rules that do not work; empty when all do."""
    wrong = [f"accepts {path}: {text!r}" for path, text in BROKEN if not check_file(path, text)]
    return wrong + [f"refuses {path}: {text!r}" for path, text in SOUND if check_file(path, text)]


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    wrong = self_check()
    if wrong:
        print("include_rules.py does not catch what it should: " + "; ".join(wrong), file=sys.stderr)
        return 1
    listed = subprocess.run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"], check=True,
                            capture_output=True, text=True).stdout.splitlines()
    files = [p for p in listed if p.endswith(SOURCES) and os.path.exists(os.path.join(root, p))]
    faults = 0
    for path in files:
        with open(os.path.join(root, path), encoding="utf-8") as f:
            for number, fault in check_file(path, f.read()):
                print(f"{path}:{number}: {fault}", file=sys.stderr)
                faults += 1
    if not files:
        print("include_rules.py: no source file found", file=sys.stderr)
    return 1 if faults or not files else 0


if __name__ == "__main__":
    sys.exit(main())
