#!/usr/bin/env python3
"""Checks who may include what (the table below), as a test.

    tools/check_layering.py [ROOT]

Prints one line per offending include and exits 1 when there is any. With
--self-test it plants offences in a scratch tree and exits 1 unless each is
found.
"""

import pathlib
import re
import sys
import tempfile

# folder -> folders of ours that it may include besides itself ("x/*": those
# below x). The longest matching folder decides.
ALLOWED = {
    "common": [],
    "common/rpc": ["common", "protos"],
    "cuda/runtime": ["common"],
    "cuda/kernels": ["common", "cuda/runtime"],
    "cache_daemon": ["common", "common/rpc", "cuda/runtime", "protos"],
    "inference_worker": ["common", "common/rpc", "cuda/*", "protos"],
    # anything but the daemon's inside; benchmarks too
    "tools": ["common", "common/rpc", "cuda/*", "inference_worker", "protos"],
    "tests": ["common", "common/rpc", "cuda/*", "inference_worker",
              "cache_daemon", "protos", "tools"],
}

# folder -> patterns of ours that it may not include although the table says so
FORBIDDEN = {
    "cache_daemon": [r"common/pml/", r"common/module_key\.h",
                     r"common/tokenizer\.h",
                     r"common/chat_template\.h", r"cuda/kernels/"],
}

# gRPC and protobuf only at the edges.
RPC_INCLUDE = re.compile(r'[<"](grpc|grpcpp|google/protobuf|google/rpc)/|\.pb\.h[>"]')
RPC_FOLDERS = ("common/rpc/", "protos/", "tools/", "tests/")
RPC_FILES = re.compile(
    r"(_service|_reactor|_call|_client|_server|_stream|proto_convert|/main)"
    r"\.(h|cc)$")

# Who may include third-party headers: header prefix -> folders.
EXTERNAL = {
    r"<?expat\.h": ["common/pml", "tests"],
    r"sqlite3\.h": ["cache_daemon/registry", "tests"],
    r"openssl/": ["common", "tests"],
    r"pcre2\.h": ["inference_worker/tokenizer"],
    r"CLI/": ["tools"],
    r"cuda(_runtime)?(_api)?\.h": ["cuda", "tests"],
}

FOLDERS = ("common", "cuda", "cache_daemon", "inference_worker", "tools",
           "tests", "protos", "promptcache")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"][^>"]+[>"])')


def folder_of(path):
    """The longest folder of the table that holds `path`."""
    best = ""
    for folder in list(ALLOWED) + ["cuda", "protos"]:
        if path.startswith(folder + "/") and len(folder) > len(best):
            best = folder
    return best


def faults_of_file(relative, text):
    layer = folder_of(relative)
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, name = match.group(1), match.group(1)[1:-1]
        where = f"{relative}:{number}: {layer}"
        if name.startswith("promptcache/") or name.startswith("google/rpc/"):
            target = "protos"
        elif name.split("/")[0] in FOLDERS and quoted.startswith('"'):
            target = folder_of(name)
        else:
            target = None
        if target is not None and layer:
            allowed = [layer] + ALLOWED.get(layer, [])
            if target not in allowed and target.split("/")[0] + "/*" not in allowed:
                yield f"{where} may not include {name}"
            for pattern in FORBIDDEN.get(layer, []):
                if re.match(pattern, name):
                    yield f"{where} may not include {name}"
        if RPC_INCLUDE.search(quoted) and not relative.startswith(RPC_FOLDERS) \
                and not RPC_FILES.search(relative):
            yield f"{where}: gRPC and protobuf belong to the edges, not here: {name}"
        for pattern, folders in EXTERNAL.items():
            if re.match(pattern, name) and \
                    not any(relative.startswith(f + "/") for f in folders):
                yield f"{where} may not include {name}"


def faults_of_tree(root):
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if path.suffix not in (".h", ".cc", ".cu", ".cuh") or \
                relative.startswith(("build", ".")):
            continue
        yield from faults_of_file(relative, path.read_text(encoding="utf-8"))


def self_test():
    planted = {
        "common/a.h": '#include "cuda/runtime/segment.h"',
        "common/b.cc": "#include <grpcpp/grpcpp.h>",
        "cuda/runtime/a.cc": '#include "inference_worker/x.h"',
        "cache_daemon/core/a.cc": '#include "common/pml/schema.h"',
        "cache_daemon/core/b.cc": '#include "inference_worker/x.h"',
        "cache_daemon/core/c.cc": "#include <sqlite3.h>",
        "inference_worker/engine/a.cc": '#include "cache_daemon/core/x.h"',
        "inference_worker/engine/b.cc": '#include "promptcache/v1/cache.pb.h"',
        "tools/cli/a.cc": '#include "cache_daemon/core/x.h"',
        "common/c.cc": '#include "common/rpc/grpc_status.h"',
    }
    fine = {
        "cache_daemon/core/ok.cc": '#include "common/module_identity.h"',
        "cache_daemon/service/node_service.cc":
            '#include "promptcache/node/v1/node.grpc.pb.h"',
        "inference_worker/engine/ok.cc": '#include "common/kv_view.h"',
    }
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        for files in (planted, fine):
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text + "\n", encoding="utf-8")
        found = {fault.split(":")[0] for fault in faults_of_tree(root)}
        for name in planted.keys() - found:
            print(f"self-test: not caught: {name}: {planted[name]}")
            bad = 1
        for name in found & fine.keys():
            print(f"self-test: wrongly refused: {name}: {fine[name]}")
            bad = 1
    return bad


def main(arguments):
    if "--self-test" in arguments:
        return self_test()
    root = pathlib.Path(arguments[0] if arguments else
                        pathlib.Path(__file__).resolve().parent.parent)
    faults = list(faults_of_tree(root))
    print("\n".join(faults) if faults else "layering: no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
