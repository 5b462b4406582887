"""What deploy/ and the tree say, read into one object: the rules compare its
parts, the self-test changes one part at a time."""

import os
import re

import kustomize

VARIANTS = ("base", "cpu")


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def flag_tables(text):
    """program -> flags, of deploy/FLAGS.md."""
    tables = {}
    for program, rows in re.findall(
            r"<!-- flags (\S+) -->\n(.*?)<!-- end", text, re.S):
        tables[program] = {
            name: value.strip("`") for name, value in
            re.findall(r"^\| `--(\w+)` \| (\S+)", rows, re.M)}
    return tables


class Containerfile:
    """Instructions by stage; continuation lines joined, comments dropped."""

    def __init__(self, text):
        self.text = text
        self.images = dict(re.findall(r"--target (\S+)\s+-t (\S+)", text))
        self.stages = {}  # name -> (parent, [instruction])
        joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", text))
        name = None
        for line in joined.splitlines():
            match = re.match(r"FROM (\S+) AS (\S+)$", line)
            if match:
                name = match[2]
                self.stages[name] = (match[1], [])
            elif name and line.strip():
                self.stages[name][1].append(line.strip())

    def instructions(self, stage, kind):
        """Of a stage and those it is built on, the oldest first."""
        lines = []
        while stage in self.stages:
            parent, own = self.stages[stage]
            lines = [i for i in own if i.split()[0] == kind] + lines
            stage = parent
        return [i.split(None, 1)[1] for i in lines]

    def packages(self, stage):
        names = []
        for line in self.instructions(stage, "RUN"):
            for part in line.split("&&"):
                match = re.search(r"apt-get install (.*)", part)
                if match:
                    names += [w for w in match[1].split()
                              if not w.startswith("-")]
        return names

    def programs(self, stage):
        """Programs of ours that an image holds."""
        return re.findall(r"/out/bin/(\S+)",
                          " ".join(self.instructions(stage, "COPY")))


class Facts:
    def __init__(self, root):
        deploy = os.path.join(root, "deploy")
        self.root = root
        self.flags = flag_tables(read(deploy, "FLAGS.md"))
        self.containerfile = Containerfile(read(deploy, "Containerfile"))
        self.version = re.search(r"project\(promptcache VERSION (\S+)",
                                 read(root, "CMakeLists.txt"))[1]
        self.manifests = {
            v: kustomize.build(os.path.join(deploy, "kubernetes", v))
            for v in VARIANTS}
        units = os.path.join(deploy, "systemd")
        self.units = {n: read(units, n) for n in sorted(os.listdir(units))}
        self.loaded = re.search(
            r'kLibrary\[\] = "(.*)"',
            read(root, "cuda", "kernels", "cublas_lt_dlopen.cc"))[1]
        self.linked = {}  # program -> packages of the libraries it links


def one(documents, kind, name=None):
    found = [d for d in documents if d["kind"] == kind and
             (name is None or d["metadata"]["name"] == name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} documents {kind} {name or ''}")
    return found[0]


class Pod:
    """One of our two programs as a variant of the manifests runs it."""

    def __init__(self, facts, variant, program):
        documents = facts.manifests[variant]
        kind = "DaemonSet" if program.endswith("daemon") else "Deployment"
        self.where = f"kubernetes/{variant}: {program}"
        self.program = program
        self.documents = documents
        self.document = one(documents, kind, program)
        self.template = self.document["spec"]["template"]
        self.spec = self.template["spec"]
        (self.container,) = self.spec["containers"]
        self.labels = self.template["metadata"]["labels"]
        name, _, self.tag = self.container["image"].partition(":")
        self.image = name
        self.stage = next(
            (s for s, image in facts.containerfile.images.items()
             if image == self.container["image"]), None)
        self.mounts = {m["mountPath"]: m
                       for m in self.container["volumeMounts"]}
        self.volumes = {v["name"]: v for v in self.spec["volumes"]}
        self.flag_lines = []
        for arg in self.container["args"]:
            self.flag_lines += self.from_file(arg) or [arg]
        self.flags = {}
        for line in self.flag_lines:
            match = re.fullmatch(r"--(\w+)=(.*)", line)
            if match:
                self.flags[match[1]] = match[2]
        self.defaults = facts.flags[program]

    def from_file(self, arg):
        match = re.fullmatch(r"--flagfile=(.*)/([^/]+)", arg)
        if not match:
            return None
        volume = self.volumes[self.mounts[match[1]]["name"]]
        data = one(self.documents, "ConfigMap",
                   volume["configMap"]["name"])["data"]
        return [line.strip() for line in data[match[2]].splitlines()
                if line.strip() and not line.startswith("#")]

    def flag(self, name):
        return self.flags.get(name, self.defaults.get(name, ""))

    def volume_at(self, path):
        """(mount, volume) that holds a file's folder, or (None, None)."""
        mount = self.mounts.get(os.path.dirname(path))
        return (mount, self.volumes[mount["name"]]) if mount else (None, None)


def pods(facts):
    return [Pod(facts, v, p) for v in VARIANTS for p in facts.flags]


BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def num_bytes(text):
    """8GiB as a flag says it, 9Gi as Kubernetes does."""
    match = re.fullmatch(r"(\d+)(?:([KMGT])i?B?)?", str(text))
    if not match:
        raise ValueError(f"not a size: {text}")
    return int(match[1]) * BYTE_UNITS[match[2] or ""]


def seconds(text):
    match = re.fullmatch(r"(\d+)(s|m)", str(text))
    if not match:
        raise ValueError(f"not a duration in s or m: {text}")
    return int(match[1]) * (60 if match[2] == "m" else 1)
