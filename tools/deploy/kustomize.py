"""What `kubectl kustomize` makes of a folder, for the part of it that deploy/
uses: resources, configMapGenerator, images, namespace and JSON patches. Where
kubectl is at hand, tools/deploy compares the two.

Config maps keep their names here: kustomize appends a hash of the content.
"""

import copy
import os

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator",
         "images", "patches"}
CLUSTER_KINDS = {"Namespace"}


def load(path):
    with open(path, encoding="utf-8") as file:
        return [d for d in yaml.safe_load_all(file) if d is not None]


def config_map(folder, generator):
    data = {}
    for name in generator["files"]:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            data[os.path.basename(name)] = file.read()
    return {"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": generator["name"]}, "data": data}


def apply_patch(document, operations):
    """RFC 6902, with the operations that we use."""
    for operation in operations:
        steps = [s.replace("~1", "/").replace("~0", "~")
                 for s in operation["path"].strip("/").split("/")]
        where = document
        for step in steps[:-1]:
            where = where[int(step) if isinstance(where, list) else step]
        last = steps[-1]
        if isinstance(where, list) and last != "-":
            last = int(last)
        op = operation["op"]
        if op == "add" and isinstance(where, list):
            where.insert(len(where) if last == "-" else last,
                         operation["value"])
        elif op == "add":
            where[last] = operation["value"]
        elif op in ("replace", "remove"):
            where[last]  # must be there
            if op == "remove":
                del where[last]
            else:
                where[last] = operation["value"]
        else:
            raise ValueError(f"patch operation {op}")


def each_container(document):
    template = document.get("spec", {}).get("template", {}).get("spec", {})
    yield from template.get("initContainers", [])
    yield from template.get("containers", [])


def rename_images(document, images):
    for container in each_container(document):
        name, _, tag = container["image"].partition(":")
        for image in images:
            if image["name"] == name:
                container["image"] = (f"{image.get('newName', name)}:"
                                      f"{image.get('newTag', tag)}")


def build(folder):
    """The documents of a folder with a kustomization.yaml."""
    (spec,) = load(os.path.join(folder, "kustomization.yaml"))
    unknown = set(spec) - KNOWN
    if unknown:
        raise ValueError(f"{folder}: cannot do {', '.join(sorted(unknown))}")
    documents = []
    for name in spec["resources"]:
        path = os.path.join(folder, name)
        documents += build(path) if os.path.isdir(path) else load(path)
    documents = copy.deepcopy(documents)
    for generator in spec.get("configMapGenerator", []):
        made = config_map(folder, generator)
        same = [d for d in documents if d["kind"] == "ConfigMap" and
                d["metadata"]["name"] == generator["name"]]
        if generator.get("behavior", "create") == "replace":
            same[0]["data"] = made["data"]
        elif same:
            raise ValueError(f"{folder}: two config maps {generator['name']}")
        else:
            documents.append(made)
    for patch in spec.get("patches", []):
        target = patch["target"]
        (document,) = [d for d in documents if d["kind"] == target["kind"] and
                       d["metadata"]["name"] == target["name"]]
        apply_patch(document, load(os.path.join(folder, patch["path"]))[0])
    for document in documents:
        rename_images(document, spec.get("images", []))
        if "namespace" in spec and document["kind"] not in CLUSTER_KINDS:
            document["metadata"]["namespace"] = spec["namespace"]
    return documents
