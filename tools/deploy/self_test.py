"""Plants faults into what the rules compare; each must be found by the rule
that it is for."""

import copy

from facts import Pod, one
import rules


def pod(facts, program, variant="base"):
    return Pod(facts, variant, program)


def daemon(facts, variant="base"):
    return pod(facts, "promptcache-daemon", variant)


def worker(facts, variant="base"):
    return pod(facts, "promptcache-worker", variant)


def edit_flags(facts, program, old, new, variant="base"):
    data = one(facts.manifests[variant], "ConfigMap", program)["data"]
    for name, text in data.items():
        assert old in text, (name, old)
        data[name] = text.replace(old, new)


def put(mapping, key, value):
    assert mapping.get(key) != value
    mapping[key] = value


def in_build(facts, old, new):
    parent, lines = facts.containerfile.stages["build"]
    changed = [line.replace(old, new) for line in lines]
    assert changed != lines
    facts.containerfile.stages["build"] = (parent, changed)


PLANTED = [
    ("flags_exist", lambda f: edit_flags(
        f, "promptcache-daemon", "--segment_bytes", "--segment_size")),
    ("flags_exist", lambda f: edit_flags(
        f, "promptcache-worker", "--drain_timeout=60s", "--listen=a:1")),
    ("flags_exist", lambda f: f.units.update({
        "promptcache-daemon.service": f.units["promptcache-daemon.service"]
        .replace("--db=", "--database=")})),
    ("images_are_built", lambda f: put(
        worker(f).container, "image", "promptcache-worker-cuda:0.0.9")),
    ("images_are_built", lambda f: setattr(f, "version", "9.9.9")),
    ("images_and_build_agree", lambda f: in_build(
        f, " build/bin/promptcache-worker", "")),
    ("the_gpu_image_is_whole", lambda f: setattr(
        f, "loaded", "libcublasLt.so.14")),
    ("the_gpu_image_is_whole", lambda f: f.containerfile.stages[
        "worker-cuda"][1].pop(0)),
    ("ports_agree", lambda f: put(
        worker(f).container["readinessProbe"]["grpc"], "port", 7071)),
    ("ports_agree", lambda f: edit_flags(
        f, "promptcache-worker", "0.0.0.0:7070", "0.0.0.0:7075")),
    ("ports_agree", lambda f: edit_flags(
        f, "promptcache-daemon", "0.0.0.0:7071", "127.0.0.1:7071")),
    ("ports_agree", lambda f: put(one(
        f.manifests["cpu"], "Service")["spec"]["ports"][0], "targetPort",
        "http")),
    ("selectors_match", lambda f: put(one(
        f.manifests["base"], "PodDisruptionBudget")["spec"]["selector"]
        ["matchLabels"], "app.kubernetes.io/name", "worker")),
    ("memory_suffices", lambda f: edit_flags(
        f, "promptcache-daemon", "--host_bytes=32", "--host_bytes=48")),
    ("memory_suffices", lambda f: edit_flags(
        f, "promptcache-daemon", "--device_bytes=8", "--device_bytes=10",
        "cpu")),
    ("memory_suffices", lambda f: edit_flags(
        f, "promptcache-worker", "--tail_bytes=1", "--tail_bytes=6", "cpu")),
    ("draining_fits", lambda f: edit_flags(
        f, "promptcache-worker", "--drain_timeout=60s", "--drain_timeout=2m")),
    ("draining_fits", lambda f: put(
        worker(f).container["lifecycle"]["preStop"]["sleep"], "seconds", 20)),
    ("folders_are_mounted", lambda f: edit_flags(
        f, "promptcache-worker", "/run/promptcache/", "/tmp/")),
    ("folders_are_mounted", lambda f: put(
        worker(f).volumes["socket"]["hostPath"], "path", "/run/other")),
    ("folders_are_mounted", lambda f: put(
        worker(f).mounts["/run/promptcache"], "readOnly", False)),
    ("folders_are_mounted", lambda f: edit_flags(
        f, "promptcache-daemon", "--db=/var/lib/", "--db=/srv/")),
    ("users_agree", lambda f: put(
        daemon(f).spec["securityContext"], "runAsUser", 10003)),
    ("users_agree", lambda f: put(
        worker(f).spec["securityContext"], "runAsGroup", 10002)),
    ("users_agree", lambda f: put(
        worker(f).container["securityContext"], "privileged", True)),
    ("users_agree", lambda f: put(daemon(f).spec, "hostPID", True)),
    ("gpus_are_for_workers", lambda f: put(
        daemon(f).container["resources"]["limits"], "nvidia.com/gpu", "1")),
    ("gpus_are_for_workers", lambda f: put(
        daemon(f).container, "env", [])),
    ("gpus_are_for_workers", lambda f: put(
        worker(f, "cpu").spec, "runtimeClassName", "nvidia")),
    ("threads_are_limited", lambda f: edit_flags(
        f, "promptcache-worker", "--threads=4", "--threads=0", "cpu")),
    ("packages_are_those_linked", lambda f: f.linked[
        "promptcache-worker"].add("libcurl4")),
    ("packages_are_those_linked", lambda f: [
        names.discard("libsqlite3-0") for names in f.linked.values()]),
]


def run(facts):
    """The number of planted faults, and lines about those not found."""
    # What the programs link is looked up elsewhere; here it fits.
    for stage in facts.containerfile.images:
        for program in facts.containerfile.programs(stage):
            facts.linked[program] = set(facts.containerfile.packages(stage))
    lines = [f"without a fault: {line}" for _, line in rules.faults(facts)]
    for number, (rule, plant) in enumerate(PLANTED):
        planted = copy.deepcopy(facts)
        plant(planted)
        found = list(getattr(rules, rule)(planted))
        if not found:
            lines.append(f"planted fault {number}: {rule} does not see it")
    return len(PLANTED), lines
