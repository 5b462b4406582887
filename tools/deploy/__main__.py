"""Checks deploy/ (tools/check_deploy runs this with its linters at hand):

  python3 tools/deploy --bin DIR    manifests against Kubernetes' schemas, and
                                    the rules; DIR holds the built programs
  python3 tools/deploy --self-test  plants faults; each must be found
  python3 tools/deploy --render VARIANT
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml

from facts import Facts, VARIANTS
import rules
import self_test

# The oldest where all that is used works without feature gates, and the newest
# that the package knows.
KUBERNETES = ("1.30", kubernetes_validate.latest_version())
# In every Debian image.
ALWAYS_THERE = {"libc6", "libgcc-s1", "libstdc++6"}


def linked_packages(path):
    """Debian packages of the libraries that a program names itself."""
    dump = subprocess.run(["objdump", "-p", path], check=True, text=True,
                          capture_output=True).stdout
    names = re.findall(r"NEEDED\s+(\S+)", dump)
    found = subprocess.run(["ldd", path], check=True, text=True,
                           capture_output=True).stdout
    paths = dict(re.findall(r"(\S+) => (\S+)", found))
    packages = set()
    for name in names:
        if name.startswith("ld-linux"):
            continue
        real = os.path.realpath(paths[name])
        # dpkg knows /lib as well as /usr/lib, whichever the package says.
        candidates = [real, real.removeprefix("/usr")]
        for candidate in candidates:
            owner = subprocess.run(["dpkg", "-S", candidate], text=True,
                                   capture_output=True)
            if owner.returncode == 0:
                packages.add(owner.stdout.split(":")[0])
                break
        else:
            sys.exit(f"{path}: no package owns {name} ({real})")
    return packages - ALWAYS_THERE


def schema_faults(facts):
    for variant, documents in facts.manifests.items():
        for document in documents:
            for version in KUBERNETES:
                try:
                    kubernetes_validate.validate(document, version,
                                                 strict=True)
                except Exception as error:  # its own types, and jsonschema's
                    yield (f"kubernetes/{variant}: {document['kind']}, "
                           f"Kubernetes {version}: {error}")


def without_hashes(documents):
    """As our own rendering: config maps without the hash of their content."""
    text = re.sub(r"(name: promptcache-(?:daemon|worker))-[a-z0-9]{10}\b",
                  r"\1", yaml.safe_dump_all(documents))
    return sorted(yaml.safe_load_all(text), key=str)


def kustomize_faults(root, facts):
    """kustomize itself, where there is one, must render the same."""
    if shutil.which("kubectl") is None:
        print("no kubectl here: kustomize itself is not asked")
        return
    for variant in VARIANTS:
        done = subprocess.run(
            ["kubectl", "kustomize",
             os.path.join(root, "deploy/kubernetes", variant)],
            text=True, capture_output=True)
        if done.returncode != 0:
            yield f"kubernetes/{variant}: {done.stderr}"
        elif without_hashes(list(yaml.safe_load_all(done.stdout))) != \
                without_hashes(facts.manifests[variant]):
            yield f"kubernetes/{variant}: kustomize renders something else"


def ignored(pattern_file):
    """Names at the root that an image's build sees, as .dockerignore says:
    nothing but what is let in by `!name`."""
    with open(pattern_file, encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip() and
                 not line.startswith("#")]
    if lines[0] != "*" or not all(line.startswith("!") for line in lines[1:]):
        sys.exit(f"{pattern_file}: `*` and then `!name` lines are understood")
    return [line[1:] for line in lines[1:]]


def build_faults(root, facts):
    """Configures what an image's build would see with its own command, and
    asks for its targets, without building them."""
    steps = " ".join(facts.containerfile.instructions("build", "RUN"))
    preset = re.search(r"cmake --preset (\S+)", steps)[1]
    targets = re.search(r"--target ([a-z -]+?) &&", steps)[1].split()
    with tempfile.TemporaryDirectory() as scratch:
        for name in ignored(os.path.join(root, ".dockerignore")):
            path = os.path.join(root, name)
            if not os.path.exists(path):
                yield f".dockerignore: there is no {name}"
                continue
            os.symlink(path, os.path.join(scratch, name))
        for command in (["cmake", "--preset", preset,
                         "-DPROMPTCACHE_CUDA=OFF"],
                        ["ninja", "-C", "build", "-n", *targets]):
            done = subprocess.run(command, cwd=scratch, text=True,
                                  capture_output=True)
            if done.returncode != 0:
                yield (f"Containerfile: {' '.join(command)}:\n"
                       f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
                return


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bin", metavar="DIR")
    what.add_argument("--self-test", action="store_true")
    what.add_argument("--render", metavar="VARIANT", choices=VARIANTS)
    args = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.dirname(
        os.path.abspath(__file__))))
    facts = Facts(root)
    if args.render:
        print(yaml.safe_dump_all(facts.manifests[args.render]))
        return
    if args.self_test:
        planted, lines = self_test.run(facts)
        print(f"self-test: {planted} faults planted, {len(lines)} not found")
    else:
        for stage in facts.containerfile.images:
            for program in facts.containerfile.programs(stage):
                facts.linked[program] = linked_packages(
                    os.path.join(args.bin, program))
        lines = [f"{rule}: {line}" for rule, line in rules.faults(facts)]
        lines += schema_faults(facts)
        lines += kustomize_faults(root, facts)
        lines += build_faults(root, facts)
        count = sum(len(d) for d in facts.manifests.values())
        print(f"{count} documents, Kubernetes {' and '.join(KUBERNETES)}, "
              f"{len(rules.RULES)} rules: {len(lines)} faults")
    for line in lines:
        print(line)
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
